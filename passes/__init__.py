"""Graph -> graph and graph -> numbers: pure, without threads, files, streams or clocks."""

if __name__ != "lohan_fx.passes":
    raise ImportError(f"imported as {__name__!r}, but its name is lohan_fx.passes: import lohan_fx.passes")
