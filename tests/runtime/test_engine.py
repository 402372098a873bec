"""The engine's end: what a close could not do in time, the next one does."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from pathlib import Path

import pytest
import torch

from lohan_fx.errors import LaneTimeout
from lohan_fx.plan import ActivationPlan, Plan, Prediction, Stage, Swap, Tier
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


def swapping(activation_bytes: int, written_bytes: int) -> Plan:
    activation = ActivationPlan("mul", "mul", "", "", activation_bytes, 1, Swap(Tier.HOST))
    found = Prediction(Stage({}), Stage({}), {"device": 0, "host": 0}, 0, written_bytes, 0, 0)
    return dataclasses.replace(plan(), activations=(activation,), prediction=found)


def test_what_an_earlier_plan_leaves_no_host_memory_for_is_told_and_counts_as_wear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine([], NvmeStore([tmp_path]), torch.device("cpu"))
    with contextlib.closing(engine), caplog.at_level(logging.WARNING, "lohan_fx.runtime.engine"):
        for activation_bytes in (1 << 20, 1 << 16):
            engine.configure(swapping(activation_bytes, 7), swap_sizes_bytes=(), activation_slots=(), brought_bytes=0)
        assert engine.wear.step_bytes == 7 and not caplog.records
        engine.configure(swapping(3 << 20, 7), swap_sizes_bytes=(), activation_slots=(), brought_bytes=0)
        assert engine.wear.step_bytes == 7 + (2 << 20)
        assert f"up to {2 << 20} go to the drives" in caplog.text
