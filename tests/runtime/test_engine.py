"""The engine's end: what a close could not do in time, the next one does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.machine import start_machine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.timeline import Timeline
from tests.runtime.test_states import plan

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.mark.parametrize("in_store", [False, True])
def test_a_close_that_was_too_late_may_be_called_again(in_store: bool, tmp_path: Path) -> None:
    store = NvmeStore([tmp_path])
    engine = Engine([], store, torch.device("cpu"))
    engine._machine = machine = start_machine(store, engine.device, Timeline(), plan().windows)
    began, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        goes_on.wait(60.0)

    def hang_in_store() -> None:
        with store._call("hanging"):
            hang()

    machine.cpu.submit(hang_in_store if in_store else hang)
    assert began.wait(60.0)
    with pytest.raises(LaneTimeout, match=r"call close\(\) again"):
        engine.close(timeout_s=0.01)
    goes_on.set()
    engine.close()
    assert machine.pool._region is None
    engine.close()
    NvmeStore([tmp_path]).close()
