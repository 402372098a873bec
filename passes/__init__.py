"""Graph -> graph and graph -> numbers: pure, without threads, files, streams or clocks (but ``solver``, which keeps what HiGHS
prints from standard output)."""

if __name__ != "lohan_fx.passes":
    raise ImportError(f"imported as {__name__!r}, but its name is lohan_fx.passes: import lohan_fx.passes")
