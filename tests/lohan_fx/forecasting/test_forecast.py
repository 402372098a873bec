"""forecast: whether drives of several sizes and rates hold a plan's store, and how long they last."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from lohan_fx.forecasting.forecast import ENDURANCE_WRITES, YEAR_S, Asked, Forecast, _check_drives
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Stage
from lohan_fx.planning.disk_space import disk_bytes
from tests.lohan_fx.reporting.test_plan_table import example

HW = HardwareProfile.preset("rtx4090-1xP5510")
DRIVE = HW.nvme[0]
PLAN = example()
NEEDED = disk_bytes(PLAN)
FAST = {"directory": "/fast", "mixed_bytes_per_s": 3 * DRIVE.mixed_bytes_per_s}


def asked(*changes: dict[str, Any]) -> Asked:
    """For a machine whose drives are alike but for ``changes``."""
    return Asked(dataclasses.replace(HW, nvme=tuple(dataclasses.replace(DRIVE, **new) for new in changes)))


def test_each_drive_must_hold_as_much_as_it_is_fast() -> None:
    """Whatever room the others have: ``compile`` stripes by bandwidth."""
    _check_drives(PLAN, asked({}, {"capacity_bytes": NEEDED * 3 // 4 + 1, **FAST}))
    with pytest.raises(
        ValueError, match=r"until /fast is full: .* bytes are missing; 1 more drives like /fast would hold"
    ):
        _check_drives(PLAN, asked({}, {"capacity_bytes": NEEDED * 3 // 4 - 1, **FAST}))


@pytest.mark.parametrize(
    ("first", "second", "short", "more", "without"),
    [
        ({}, {"capacity_bytes": NEEDED * 3 // 8, **FAST}, "/fast", 2, True),
        ({"capacity_bytes": NEEDED // 8}, {"capacity_bytes": NEEDED * 3 // 4}, "nvme 1", 6, False),
        ({"capacity_bytes": NEEDED // 8}, {"capacity_bytes": NEEDED // 8}, "these", 6, False),
    ],
)
def test_the_drive_that_is_short_is_named_and_what_would_do_does(
    first: dict[str, Any], second: dict[str, Any], short: str, more: int, without: bool
) -> None:
    with pytest.raises(ValueError) as refused:
        _check_drives(PLAN, asked(first, second))
    said = re.search(
        r"(\d+) more drives like (\S+ ?\d*) would hold it(, and so would the others without it)?, or",
        str(refused.value),
    )
    assert said is not None
    assert said.groups() == (str(more), short, ", and so would the others without it" if without else None)
    like = second if short == "/fast" else first
    _check_drives(PLAN, asked(first, second, *more * [like]))
    with pytest.raises(ValueError, match="bytes are missing"):
        _check_drives(PLAN, asked(first, second, *(more - 1) * [like]))


@pytest.mark.parametrize(("larger", "faster", "drives"), [(10, 1, 2), (1, 3, 4 / 3), (3, 3, 4)])
def test_drives_last_until_the_first_is_worn(larger: int, faster: int, drives: float) -> None:
    """A drive that is as fast wears as fast, however large another is, and one that is faster sooner."""
    assert PLAN.prediction is not None
    prediction = dataclasses.replace(PLAN.prediction, backward=Stage({"ssd": 1.5}))
    changes = {"drive_bytes": larger * DRIVE.capacity_bytes, "mixed_bytes_per_s": faster * DRIVE.mixed_bytes_per_s}
    nothing: Any = None
    plan = dataclasses.replace(PLAN, prediction=prediction)
    found = Forecast(nothing, asked({}, changes), plan, None, nothing, 0)
    written_bytes_per_s = prediction.nvme_write_bytes / prediction.step_s
    years = ENDURANCE_WRITES * drives * DRIVE.capacity_bytes / written_bytes_per_s / YEAR_S
    assert found.wear_years == pytest.approx(years)
