"""combinations: usually each value of each axis, and of equally long axes not always the same two together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests import exhaustive
from tests.exhaustive import combinations

AXES = [["ab", "12"], ["abc", "12"], ["ab", "123456", "xy"], ["abcd", "12", "xy"], ["a", "1"]]


@pytest.mark.parametrize("axes", AXES)
def test_each_value_is_tried(axes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    every = set(itertools.product(*axes))
    monkeypatch.setattr(exhaustive, "EXHAUSTIVE", True)
    assert set(combinations(*axes)) == every
    monkeypatch.setattr(exhaustive, "EXHAUSTIVE", False)
    some = combinations(*axes)
    assert len(some) == len(set(some)) == max(map(len, axes)) and set(some) <= every
    assert [set(tried) for tried in zip(*some, strict=True)] == [set(axis) for axis in axes]


def test_axes_of_one_length_do_not_run_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "EXHAUSTIVE", False)
    assert {pair[1:] for pair in combinations("abcd", "12", "xy")} == set(itertools.product("12", "xy"))
