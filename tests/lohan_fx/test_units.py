"""Pretty units."""

from __future__ import annotations

import pytest

from lohan_fx.units import format_bytes, format_flops, format_seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (20 << 10, "20.0 KiB"),
        (172_544, "168 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 62, "4,096 PiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("flops", "text"), [(0, "0"), (7, "7.00 FLOP"), (1_310_720, "1.31 MFLOP"), (1e15, "1.00 PFLOP")]
)
def test_flops(flops: float, text: str) -> None:
    assert format_flops(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (1.7e-5, "17.0 us"), (0.000999, "999 us"), (0.0125, "12.5 ms"), (2.4, "2.40 s"), (7200.0, "7,200 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_lane_without_drives_never_ends() -> None:
    assert format_seconds(float("inf")) == "never"
