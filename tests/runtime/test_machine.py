"""Machine: what its lanes take of the processor."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
import torch

from lohan_fx.plan import Windows
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.machine import start_machine, use_threads
from lohan_fx.runtime.nvme_store import SSD_THREADS, NvmeStore
from lohan_fx.runtime.timeline import Timeline

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.mark.parametrize("drives", [1, 3])
def test_each_drive_has_threads(drives: int, tmp_path: Path) -> None:
    directories = [tmp_path / str(number) for number in range(drives)]
    for directory in directories:
        directory.mkdir()
    with NvmeStore(directories) as store:
        windows = Windows(0, 0, 0, 4096, 4096, 1, 2, 2, 0)
        machine = start_machine(store, torch.device("cpu"), Timeline(), windows)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("lohan-ssd")]
        machine.close()
    assert len(names) == SSD_THREADS * drives


def test_a_lane_keeps_its_own_number_of_threads_whatever_others_say_later() -> None:
    before = torch.get_num_threads()
    with Lane("cpu", initializer=functools.partial(use_threads, 1)) as lane:
        try:
            torch.set_num_threads(before + 1)
            assert lane.submit(torch.get_num_threads).wait() == 1
            assert torch.get_num_threads() == before + 1
        finally:
            torch.set_num_threads(before)
