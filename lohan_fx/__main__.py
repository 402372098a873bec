"""``python -m lohan_fx``: the same as the command ``lohan-fx``."""

import sys

from lohan_fx.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
