"""turn: how long what crosses is away, by hand and whatever is done with it."""

from __future__ import annotations

import pytest

from lohan_fx import meta, ops
from lohan_fx.meta import Lane
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.turn import seconds_away
from lohan_fx.plan import Decision, Keep, Swap, Tier
from tests.passes.graphs import captured, flops_as_seconds, plan_for, rewrite


def halves_of(name: str, decision: Decision) -> Halves:
    found = captured(name)
    return rewrite(found, plan_for(found, decision))


def computed_s(halves: Halves) -> float:
    return sum(
        flops_as_seconds(meta.cost(n))
        for _, gm in halves.graphs()
        for n in gm.graph.nodes
        if n.op == "call_function" and meta.cost(n).lane is Lane.COMPUTE
    )


@pytest.mark.parametrize("name", ["two-layers", "transformer", "tied"])
def test_between_last_and_first_use(name: str) -> None:
    """The definition, node by node, where everything is kept."""
    halves = halves_of(name, Keep())
    assert halves.backward is not None
    found = seconds_away(halves, flops_as_seconds)
    forward, backward = (list(gm.graph.nodes) for _, gm in halves.graphs())
    placeholders = halves.saved_placeholders()
    for node in halves.crossing():
        if not placeholders[node.name].users:
            assert node.name not in found
            continue
        reads = {node}  # with those of its views, which have its memory
        for later in forward[forward.index(node) + 1 : -1]:
            viewed = later.op == "call_function" and meta.cost(later).is_view
            reads |= {later} if viewed and reads & set(later.all_input_nodes) else set()
        last = max(forward.index(n) for n in forward[:-1] if n in reads or reads & set(n.all_input_nodes))
        first = min(backward.index(user) for user in placeholders[node.name].users)
        between = [*forward[last + 1 :], *backward[:first]]
        seconds = sum(
            flops_as_seconds(meta.cost(n))
            for n in between
            if n.op == "call_function" and meta.cost(n).lane is Lane.COMPUTE
        )
        assert found[node.name] == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["two-layers", "transformer"])
def test_what_is_swapped_is_away_as_long_as_if_it_were_kept(name: str) -> None:
    kept, swapped = (
        seconds_away(halves_of(name, decision), flops_as_seconds) for decision in (Keep(), Swap(Tier.NVME))
    )
    halves = halves_of(name, Swap(Tier.NVME))
    away = {meta.origin(n) for n in halves.forward.graph.find_nodes(op="call_function", target=ops.SWAP_OUT)}
    assert away and away <= swapped.keys()
    for value in away & kept.keys():
        assert swapped[value or ""] == pytest.approx(kept[value or ""])


def test_the_first_made_is_away_longest_and_the_last_made_shortest() -> None:
    kept = halves_of("transformer", Keep())
    found = seconds_away(kept, flops_as_seconds)
    order = [node.name for node in kept.crossing() if node.op == "call_function" and node.name in found]
    assert (
        max(found, key=lambda name: found[name]) in order[:3] and min(found, key=lambda name: found[name]) in order[-3:]
    )
    assert all(0 <= seconds <= computed_s(kept) for seconds in found.values())


def test_without_a_backward_nothing_is_away() -> None:
    halves = halves_of("two-layers", Keep())
    halves.backward = None
    assert seconds_away(halves, flops_as_seconds) == {}
