"""scratch: memory that is there only while something runs is seen, and nothing else is."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lohan_fx import meta
from lohan_fx.measuring import scratch
from lohan_fx.measuring.scratch import NOTICED_BYTES, as_copy, watched
from lohan_fx.runtime.resident_limit import resident_bytes
from tests.passes.graphs import captured

MIB = 1 << 20


def used(value: torch.Tensor) -> torch.Tensor:
    """Its sum, after a while: on a machine that has other work the thread that looks may come late."""
    time.sleep(0.1)
    return value.sum()


def test_what_lives_only_while_it_runs_is_seen() -> None:
    found = watched(lambda: used(torch.ones(16 * MIB)))
    assert 60 * MIB <= found <= 68 * MIB


def test_what_it_makes_and_what_it_keeps_is_no_scratch() -> None:
    kept: list[torch.Tensor] = []
    assert watched(lambda: torch.ones(16 * MIB)) == 0
    assert watched(lambda: kept.append(torch.ones(16 * MIB))) == 0


def test_what_is_taken_from_holes_is_seen_too() -> None:
    """The heap keeps what is freed below something that lives; its pages are resident before the op runs."""
    below = [torch.ones(MIB // 4) for _ in range(48)]
    above = torch.ones(16)
    del below
    found = watched(lambda: _stacked([torch.ones(MIB // 4) for _ in range(48)]))
    assert 92 * MIB <= found <= 100 * MIB  # the parts, and all of them once more
    del above


@pytest.fixture
def _collector() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@pytest.mark.usefixtures("_collector")
def test_what_the_collector_would_free_meanwhile_hides_nothing() -> None:
    def run() -> torch.Tensor:
        gc.set_threshold(1)  # at the next list, were it on
        return _stacked([torch.ones(MIB // 4) for _ in range(48)])

    gc.disable()
    cycle: list[object] = [torch.ones(MIB // 4) for _ in range(11)]
    cycle.append(cycle)
    del cycle
    gc.enable()
    found = watched(run)
    assert 92 * MIB <= found <= 100 * MIB
    assert gc.isenabled()
    gc.disable()
    watched(run)
    assert not gc.isenabled()


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return used(torch.stack(parts))


def test_what_it_raises_is_raised_and_the_next_is_watched() -> None:
    with pytest.raises(ZeroDivisionError):
        watched(lambda: 1 // 0)
    assert watched(lambda: used(torch.ones(16 * MIB))) > 0


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (131_006_464, 131_072_000),  # the gradient of 32,000 x 1,024 in fp32, as far as it was seen
        (66_000_000, 65_536_000),
        (100_000_000, 96 * NOTICED_BYTES),  # no copy of anything
    ],
)
def test_about_the_size_of_a_copy_is_that_size(nbytes: int, told: int) -> None:
    values = [torch.empty(32_000, 1024, device="meta"), torch.empty(32, 1024, device="meta"), 3, None]
    assert as_copy(nbytes, values) == told


@pytest.mark.parametrize("seen", [14 * MIB - 4096, 14 * MIB, 14 * MIB + 4096, 14 * MIB + 81_920])
def test_some_pages_more_or_less_are_the_same_plan(seen: int) -> None:
    """Of the same op, in other processes: a training that is resumed under its promise must not be refused for them."""
    assert as_copy(seen, [torch.empty(MIB // 2, device="meta")]) == 14 * MIB


def test_a_graph_for_many_sizes_stays_one() -> None:
    """Each size that is compared with what was seen would be a guard."""
    nodes = captured("two-layers", dynamic=True).joint.graph.nodes
    of_rows = [v for n in nodes if (v := meta.tensor(n)) is not None and isinstance(v.numel(), torch.SymInt)]
    environment = of_rows[0].numel().node.shape_env
    before = len(environment.guards)
    found = as_copy(8 * of_rows[0].numel().node.hint, of_rows)
    assert type(found) is int and len(environment.guards) == before


def test_ctrl_c_as_a_watch_begins_leaves_no_thread_that_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = scratch._Watch()
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(scratch, "resident_bytes", _interrupted_in_main(resident_bytes))
        with watch:
            pass
    watch._thread.join(10.0)
    assert not watch._thread.is_alive()


def _interrupted_in_main(now: Callable[[], int]) -> Callable[[], int]:
    def interrupted() -> int:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return now()

    return interrupted
