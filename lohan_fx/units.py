"""units: numbers with pretty units, for people; everything else in lohan_fx keeps SI."""

from __future__ import annotations

import math


def format_bytes(nbytes: int) -> str:
    """``512 B``, ``20.0 KiB``, ``1.50 GiB``: three digits, powers of 1024."""
    return f"{nbytes} B" if nbytes < 1024 else _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_flops(flops: float) -> str:
    """``0``, ``1.31 MFLOP``: three digits, powers of 1000."""
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")) if flops else "0"


def format_seconds(seconds: float) -> str:
    """``0``, ``13.0 us``, ``9.13 ms`` or ``2.40 s``: three digits; ``never`` where no lane could carry the work."""
    if math.isinf(seconds):
        return "never"
    if not seconds:
        return "0"
    return f"{_digits(seconds)} s" if seconds >= 1 else _scaled(seconds * 1e6, 1000, ("us", "ms", "s"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value /= base
        power += 1
    return f"{_digits(value)} {units[power]}"


def _digits(value: float) -> str:
    """Three significant digits, and all of them left of the point."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"
