"""commands: the command ``lohan-fx`` and what each of its subcommands does."""
