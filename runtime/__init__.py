"""Executes: streams, buffers, NVMe and out-of-core Adam. Knows slots, not FX nodes."""

if __name__ != "lohan_fx.runtime":
    raise ImportError(f"imported as {__name__!r}, but its name is lohan_fx.runtime: import lohan_fx.runtime")
