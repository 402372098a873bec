"""Machine: what its lanes take of the processor."""

from __future__ import annotations

import functools

import pytest
import torch

from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.machine import use_threads

pytestmark = pytest.mark.usefixtures("leak_check")


def test_a_lane_keeps_its_own_number_of_threads_whatever_others_say_later() -> None:
    before = torch.get_num_threads()
    with Lane("cpu", initializer=functools.partial(use_threads, 1)) as lane:
        try:
            torch.set_num_threads(before + 1)
            assert lane.submit(torch.get_num_threads).wait() == 1
            assert torch.get_num_threads() == before + 1
        finally:
            torch.set_num_threads(before)
