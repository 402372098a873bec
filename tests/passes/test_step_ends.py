"""step_ends: what a step begins and ends with, whatever is done with activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lohan_fx import meta
from lohan_fx.meta import Lane
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.step_ends import step_ends
from lohan_fx.plan import Blocking, Decision, Ends, Keep, Recompute, Swap, Tier
from tests.passes.graphs import WINDOWS, captured, flops_as_seconds, plan_for, rewrite

ROOMY = replace(WINDOWS, gradient_bytes=1 << 40)


@pytest.mark.parametrize(("name", "early"), [("transformer", True), ("tied", False)])
@pytest.mark.parametrize("decision", [Keep(), Recompute(), Swap(Tier.NVME)])
def test_the_embedding_is_fetched_first_and_gets_its_gradient_last(name: str, early: bool, decision: Decision) -> None:
    """The head's gradient is the first, unless it is the embedding's, too."""
    found = captured(name)
    halves = rewrite(found, plan_for(found, decision))
    ends = step_ends(halves, flops_as_seconds, ROOMY)
    # A lookup takes no time by FLOPs: the first matmul stands at the ends as well.
    for names in (ends.first_fetches, ends.last_gradients):
        assert "embed.weight" in names and all(name.startswith(("embed.", "layers.0.")) for name in names)
        assert "layers.0.fc2.weight" not in names
    kept = step_ends(rewrite(found, plan_for(found, Keep())), flops_as_seconds, ROOMY)
    # What is recomputed changes where `schedule` puts a node that takes next to nothing.
    assert ends.last_fetch_s == pytest.approx(kept.last_fetch_s, rel=1e-3)
    assert ends == replace(kept, last_fetch_s=ends.last_fetch_s)
    assert (ends.first_gradient_s < 0.2 * backward_s(halves)) == early


def backward_s(halves: Halves) -> float:
    assert halves.backward is not None
    own = (n for n in halves.backward.graph.nodes if n.op == "call_function" and not n.name.startswith("recompute_"))
    return sum(flops_as_seconds(meta.cost(n)) for n in own if meta.cost(n).lane is Lane.COMPUTE)


def test_where_compute_takes_no_time_all_stands_at_both_ends() -> None:
    found = captured("two-layers")
    everything = frozenset(p.name for p in found.parameters.values())
    assert step_ends(rewrite(found, plan_for(found, Keep())), lambda cost: 0.0, ROOMY) == Ends(everything, everything)


def test_what_follows_the_last_fetch_is_counted_of_what_drives_bring() -> None:
    """By hand: mm, pow and mean follow the second weight; addmm and relu stand between the first and it."""
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()))
    mm = 2 * 3 * 4 * 8 + 1.0

    def last_fetch_s(*streamed: str) -> float:
        return step_ends(halves, flops_as_seconds, ROOMY, streamed).last_fetch_s

    assert (
        step_ends(halves, flops_as_seconds, ROOMY).last_fetch_s
        == last_fetch_s("first.weight", "second.weight")
        == mm + 2
    )
    assert last_fetch_s("first.weight") == 2 * mm + 3
    assert last_fetch_s() == 0.0
    # A fetch of what is at home waits for its update.
    updated = {"second.weight": 1, "first.weight": 0}
    assert step_ends(halves, flops_as_seconds, ROOMY, (), updated).last_fetch_s == mm + 2
    assert step_ends(halves, flops_as_seconds, ROOMY, ("first.weight",), updated).last_fetch_s == 2 * mm + 3
    assert (
        step_ends(halves, flops_as_seconds, ROOMY, ("first.weight",), {"second.weight": 1 << 20}).last_fetch_s == mm + 2
    )


def test_without_a_backward_nothing_is_updated() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()))
    halves.backward = None
    assert step_ends(halves, flops_as_seconds, ROOMY) == Ends()


def test_a_gradient_that_fills_the_window_stops_compute_before_the_next() -> None:
    """By hand: three gradients, of 128, 32 and 128 bytes; two mm and four others come before the first."""
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()))
    mm = 2 * 3 * 4 * 8 + 1.0
    between = {"second.weight": Blocking(1 + mm + 1, 4096), "first.bias": Blocking(0.0, 0)}

    def blocking(gradient_bytes: int) -> Mapping[str, Blocking]:
        windows = replace(WINDOWS, gradient_bytes=gradient_bytes)
        return step_ends(halves, flops_as_seconds, windows).blocking

    assert blocking(288) == {}
    assert blocking(150) == blocking(0) == between


def test_what_the_optimizers_buffers_hold_is_written_while_compute_goes_on() -> None:
    """Two buffers: a small gradient is one chunk, and of the one before it another is still to be written."""
    windows = replace(WINDOWS, optimizer_buffers=2, chunk_elements=4096)
    assert Blocking(0.0, 0).written(16, windows) == 0.0
    assert Blocking(0.0, 4096).written(3 * 4096, windows) == pytest.approx(2 / 3)
    assert Blocking(0.0, 4 * 4096).written(3 * 4096, windows) == 1.0
