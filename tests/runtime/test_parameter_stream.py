"""Fetches beside a GPU: a thread that is ahead of its transfers does not keep the drives from others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from lohan_fx import ops
from lohan_fx.errors import LohanError
from lohan_fx.runtime.activation_swap import ActivationSwap
from lohan_fx.runtime.device_link import CpuLink, Moment
from lohan_fx.runtime.host_arena import HostArena
from lohan_fx.runtime.machine import STATE_READ_PRIORITY, Machine
from lohan_fx.runtime.parameter_stream import ParameterStream
from lohan_fx.runtime.slots import Residency
from tests.runtime.rig import CHUNK_ELEMENTS, IO_BYTES, machine, parameter

pytestmark = pytest.mark.usefixtures("leak_check")

PATIENCE_S = 30.0
PIECES = 12


class LateLink(CpuLink):
    """A device that has not come to the point from which on it may be copied to, as a GPU behind its launching thread."""

    def __init__(self) -> None:
        super().__init__(shares_memory=False)
        self.reached = threading.Event()

    def mark(self) -> Moment:
        return self.reached

    def finish(self, moment: Moment) -> None:
        assert moment is None or moment.wait(PATIENCE_S)


def late(made: Machine) -> LateLink:
    made.link = link = LateLink()
    return link


def test_drives_serve_others_while_fetched_parameters_wait_for_the_device(tmp_path: Path) -> None:
    weight = parameter("weight", PIECES * IO_BYTES // 4)
    with machine(tmp_path, shares_memory=False) as made:
        made.store.allocate(weight.extents(CHUNK_ELEMENTS))
        value, memory = made.landing.on_pages(weight.shape, torch.float32)
        value.copy_(torch.arange(weight.numel))
        made.store.write(weight.master_extent, 0, memory, weight.compute_bytes)
        stream = ParameterStream(made, {0: weight}, {0: Residency()}, lambda slot: None)
        link = late(made)
        fetched = stream.fetch(0)
        _, page = made.landing.on_pages(torch.Size([IO_BYTES]), torch.uint8)
        # More pieces than buffers and threads: were threads to wait for buffers, this would be read when the device is
        # reached, which is after it.
        made.ssd.submit(lambda: made.read(weight.master_extent, 0, page, IO_BYTES), priority=STATE_READ_PRIORITY).wait(
            PATIENCE_S
        )
        assert made.pool.asking()[0] == PIECES - 2
        link.reached.set()
        ops._wait(fetched)
        assert torch.equal(fetched, value)


def test_draining_waits_for_pieces_that_have_no_buffer_yet(tmp_path: Path) -> None:
    with machine(tmp_path, shares_memory=False) as made:
        swap = ActivationSwap(made, HostArena(None))
        x = torch.randn(PIECES * IO_BYTES // 4)
        handle = swap.swap_out(x, "nvme")
        made.drain(PATIENCE_S)
        link = late(made)
        back = swap.swap_in(handle)
        threading.Timer(0.05, link.reached.set).start()
        made.drain(PATIENCE_S)
        assert made.pool.asking()[0] == 0 and made.pool.in_use("swap_in") == 0
        ops._wait(back)
        assert torch.equal(back, x)


def test_closing_fails_what_has_no_buffer_yet(tmp_path: Path) -> None:
    with machine(tmp_path, shares_memory=False) as made:
        swap = ActivationSwap(made, HostArena(None))
        handle = swap.swap_out(torch.randn(PIECES * IO_BYTES // 4), "nvme")
        made.drain(PATIENCE_S)
        link = late(made)
        back = swap.swap_in(handle)
        link.reached.set()
        made.close()
        del back, handle
        ops._expected.arrivals.clear()


class MomentsLink(CpuLink):
    """Each mark is a moment of its own, which the device reaches when it is told to."""

    def __init__(self) -> None:
        super().__init__(shares_memory=False)

    def mark(self) -> Moment:
        return threading.Event()

    def finish(self, moment: Moment) -> None:
        if isinstance(moment, Exception):
            raise moment
        assert moment is None or moment.wait(PATIENCE_S)


def test_a_copy_that_is_early_does_not_hold_up_another(tmp_path: Path) -> None:
    with machine(tmp_path, shares_memory=False) as made:
        made.link = link = MomentsLink()
        marks = [link.mark(), link.mark()]
        link.mark = lambda: marks.pop(0)  # type: ignore[method-assign]
        reached, later = list(marks)
        now, then = made.passing(), made.passing()
        ran, copied = [], threading.Event()

        def copy_now() -> None:
            ran.append("now")
            copied.set()

        made.copy_in(then, lambda: ran.append("then"), "then", pytest.fail)
        made.copy_in(now, copy_now, "now", pytest.fail)
        reached.set()
        assert copied.wait(PATIENCE_S)
        assert ran == ["now"]
        later.set()
        made.drain(PATIENCE_S)
        assert ran == ["now", "then"]


def test_nobody_waits_for_a_device_that_has_come_that_far(tmp_path: Path) -> None:
    """No thread is asked to, and the copy is on its lane at once; a moment that has not come has those before it go first."""

    class KnownLink(MomentsLink):
        def has_come(self, moment: Moment) -> bool:
            return moment is None or moment.is_set()

    with machine(tmp_path, shares_memory=False) as made:
        made.link = KnownLink()
        first, second, third = (made.passing() for _ in range(3))
        first.moment.set()
        ran: list[str] = []
        made.copy_in(first, lambda: ran.append("first"), "first", pytest.fail)
        made.h2d.drain(PATIENCE_S)
        assert ran == ["first"] and first.work is None
        made.copy_in(third, lambda: ran.append("third"), "third", pytest.fail)
        assert first.work is None
        assert None not in (second.work, third.work)
        third.moment.set()
        made.h2d.drain(PATIENCE_S)
        assert ran == ["first"]
        made.copy_in(second, lambda: ran.append("second"), "second", pytest.fail)
        second.moment.set()
        made.drain(PATIENCE_S)
        assert sorted(ran) == ["first", "second", "third"]


def test_a_copy_fails_with_the_device(tmp_path: Path) -> None:
    with machine(tmp_path, shares_memory=False) as made:
        made.link = link = MomentsLink()
        broken = RuntimeError("the device is gone")
        link.mark = lambda: broken  # type: ignore[method-assign]
        failures: list[BaseException] = []
        made.copy_in(made.passing(), pytest.fail, "copy", failures.append)
        made.drain(PATIENCE_S)
        assert failures == [broken]


def test_closing_fails_a_copy_whose_moment_has_not_come(tmp_path: Path) -> None:
    with machine(tmp_path, shares_memory=False) as made:
        made.link = link = MomentsLink()
        marks = [link.mark(), link.mark()]
        (first, _) = marks
        link.mark = lambda: marks.pop(0)  # type: ignore[method-assign]
        failures: list[BaseException] = []
        made.passing()
        made.copy_in(made.passing(), pytest.fail, "copy", failures.append)
        threading.Timer(0.05, first.set).start()
        made.close()
        assert [type(error) for error in failures] == [LohanError]
