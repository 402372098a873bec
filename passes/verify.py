"""verify: the invariants of the rewritten graphs, checked after every pass.

After ``partition`` and ever after
  - the graphs pass ``graph.lint()``; the forward hands over what the backward takes, in the same order
  - every op reads the values that it read in the captured graph, and every output is the value that it was there: a
    fetched parameter, a swapped-in or a recomputed activation stands for itself
  - random ops are never replayed
After ``insert_recompute``
  - nothing crosses but what the plan keeps or swaps, beside inputs and outputs; and none of that is computed again
After ``insert_fetches``
  - nothing but ``fetch`` reads a shell, by its slot; each start has one user, its ``wait``, and each ``wait`` waits for
    a start
After ``insert_swaps``
  - every ``swap_in`` has one ``swap_out`` of its slot and value and the other way round; nothing reads a value after its
    ``swap_out``, and nothing but ``swap_in`` a handle; what the plan swaps crosses as a handle
After ``insert_gradient_offload``
  - every trainable parameter with a gradient reaches exactly one ``offload_grad``; no gradient of a parameter is
    returned, and what leaves shares no memory with what is or with an input; no fetch of a parameter, and no use of a
    fetched one, follows its ``offload_grad``
After ``schedule``
  - the simulated live bytes stay within the device's budget

A failure names the node, prints its neighbourhood and says which pass broke it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NoReturn

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.errors import VerifyError
from lohan_fx.passes.annotate import is_random
from lohan_fx.passes.halves import Halves, last_user, outputs_of, positions
from lohan_fx.passes.liveness import device_peaks, storage_of
from lohan_fx.plan import Plan, Recompute, Swap, Tier

NEIGHBOURS = 3


def verify(halves: Halves, plan: Plan, *, after: str) -> None:
    """Raise ``VerifyError`` if an invariant that holds after the pass named ``after`` is broken."""
    if after not in ORDER:
        raise ValueError(f"no pass is called {after!r}: expected one of {', '.join(ORDER)}")
    for name in ORDER[: ORDER.index(after) + 1]:
        for check in CHECKS.get(name, ()):
            check(halves, plan, after)


def _fail(gm: GraphModule, node: Node, after: str, what: str) -> NoReturn:
    nodes = list(gm.graph.nodes)
    place = nodes.index(node)
    around = "\n".join(
        f"  {'->' if n is node else '  '} {n.format_node() or n.name}"
        for n in nodes[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]
    )
    raise VerifyError(f"after {after}: {node.name}: {what}\n{around}")


# --- after partition ------------------------------------------------------------------------------------------


def _lints(halves: Halves, plan: Plan, after: str) -> None:
    for name, gm in halves.graphs():
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise VerifyError(f"after {after}: the {name} graph is malformed: {error}") from error


def _hands_over(halves: Halves, plan: Plan, after: str) -> None:
    if halves.backward is None:
        return
    crossing = halves.crossing()
    tensors = [_value_name(n) for n in crossing if meta.tensor(n) is not None]
    sizes = [_value_name(n) for n in crossing if meta.tensor(n) is None]
    taken = list(halves.saved_placeholders())
    if sizes + tensors != taken:
        raise VerifyError(f"after {after}: the forward hands over {sizes + tensors}, the backward takes {taken}")


def _reads_the_same(halves: Halves, plan: Plan, after: str) -> None:
    for _, gm in halves.graphs():
        for node in gm.graph.nodes:
            expected = meta.reads(node)
            if expected is None or node.op != "call_function":
                continue
            found = tuple(_value_name(n) for n in node.all_input_nodes)
            if found != expected:
                _fail(gm, node, after, f"reads {found}; in the captured graph it read {expected}")


def _returns_the_same(halves: Halves, plan: Plan, after: str) -> None:
    for name, gm in halves.graphs():
        output = gm.graph.output_node()
        returned = outputs_of(gm)[: halves.num_outputs] if name == "forward" else outputs_of(gm)
        leaving = halves.gradients if name == "backward" else {}
        captured = meta.reads(output)
        if captured is not None and len(returned) < (halves.num_outputs if name == "forward" else len(captured)):
            _fail(gm, output, after, f"returns {len(returned)} values; the captured graph returned {len(captured)}")
        for place, (value, expected) in enumerate(zip(returned, captured or (), strict=False)):
            found = _value_name(value) if isinstance(value, Node) else ""
            if found != expected and not (value is None and place in leaving):
                what = f"returns {found or None} at place {place}; the captured graph returned {expected or None}"
                _fail(gm, output, after, what)


def _value_name(node: Node) -> str:
    """The name in the captured graph of the value that ``node`` holds."""
    if node.op not in ("call_function", "get_attr"):
        return node.name
    if node.target is ops.SWAP_OUT:
        return str(meta.origin(node))
    if node.target is ops.WAIT:
        start = node.all_input_nodes[0] if node.all_input_nodes else node
        return start.all_input_nodes[0].name if start.target in ops.STARTS else f"wait({start.name})"
    if node.target in ops.ALL:
        return f"{node.name} before its wait"
    return meta.origin(node) or node.name


def _never_replays(halves: Halves, plan: Plan, after: str) -> None:
    if halves.backward is None:
        return
    drawn = {n.name for n in halves.forward.graph.nodes if n.op == "call_function" and is_random(n)}
    for node in halves.backward.graph.nodes:
        if node.op == "call_function" and is_random(node) and _value_name(node) in drawn:
            _fail(halves.backward, node, after, "draws the random numbers of the forward again; save its outputs")


# --- after insert_recompute -----------------------------------------------------------------------------------


def _saves_the_plan(halves: Halves, plan: Plan, after: str) -> None:
    outputs = _output_names(halves)
    for node in halves.crossing():
        name = _value_name(node)
        if node.op == "placeholder" or name in outputs or meta.tensor(node) is None:
            continue
        decision = plan.decision(name)
        if decision is None or isinstance(decision, Recompute):
            _fail(halves.forward, node, after, f"crosses to the backward, but the plan says {decision}")
    if halves.backward is None:
        return
    for node in filter(meta.is_recomputed, halves.backward.graph.nodes):
        decision = plan.decision(_value_name(node))
        if decision is not None and not isinstance(decision, Recompute):
            _fail(halves.backward, node, after, f"computes {_value_name(node)} again, but the plan says {decision}")


# --- after insert_fetches -------------------------------------------------------------------------------------


def _only_fetch_reads_shells(halves: Halves, plan: Plan, after: str) -> None:
    for _, gm in halves.graphs():
        for node in gm.graph.find_nodes(op="placeholder"):
            parameter = halves.parameters.get(node.name)
            for user in node.users if parameter is not None else ():
                if user.op != "output" and user.target is not ops.FETCH:
                    _fail(gm, user, after, f"reads the shell {node.name} itself; it must read wait(fetch(..))")
                if user.op != "output" and parameter is not None and user.args[1] != parameter.slot:
                    _fail(gm, user, after, f"fetches slot {user.args[1]}; {parameter.name} is slot {parameter.slot}")


def _starts_are_waited_for(halves: Halves, plan: Plan, after: str) -> None:
    for _, gm in halves.graphs():
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in ops.STARTS:
                users = list(node.users)
                if len(users) != 1 or users[0].target is not ops.WAIT:
                    _fail(gm, node, after, f"must be read by one wait alone; its users are {users}")
            if node.op == "call_function" and node.target is ops.WAIT:
                start = node.all_input_nodes[0]
                if start.op != "call_function" or start.target not in ops.STARTS:
                    _fail(gm, node, after, f"waits for {start.name}, which starts nothing")


# --- after insert_swaps ---------------------------------------------------------------------------------------


def _swaps_pair_up(halves: Halves, plan: Plan, after: str) -> None:
    if halves.backward is None:
        return
    forward, backward = halves.forward, halves.backward
    out, back = _by_slot(forward, ops.SWAP_OUT), _by_slot(backward, ops.SWAP_IN)
    for slot in out.keys() | back.keys():
        leaving, returning = out.get(slot, []), back.get(slot, [])
        if len(leaving) != 1 or len(returning) != 1:
            gm, node = (forward, leaving[-1]) if leaving else (backward, returning[-1])
            what = f"slot {slot} has {len(leaving)} swap_out and {len(returning)} swap_in; expected one each"
            _fail(gm, node, after, what)
        handle, value = returning[0].all_input_nodes[0].name, _value_name(leaving[0])
        if handle != value:
            _fail(backward, returning[0], after, f"slot {slot} holds {value}, not {handle}")
    outputs, taken = _output_names(halves), halves.saved_placeholders()
    for node in halves.crossing():
        for user in taken[_value_name(node)].users if node.target is ops.SWAP_OUT else ():
            if user.target is not ops.SWAP_IN:
                _fail(backward, user, after, f"reads the handle of {_value_name(node)}; it must read wait(swap_in(..))")
        if isinstance(plan.decision(node.name), Swap) and node.name not in outputs:
            _fail(forward, node, after, "is planned to be swapped, but crosses as it is")


def _by_slot(gm: GraphModule, op: Callable[..., object]) -> dict[object, list[Node]]:
    found: dict[object, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=op):
        found.setdefault(node.args[1], []).append(node)
    return found


def _output_names(halves: Halves) -> set[str]:
    return {n.name for n in outputs_of(halves.forward)[: halves.num_outputs] if isinstance(n, Node)}


def _not_read_after_swap_out(halves: Halves, plan: Plan, after: str) -> None:
    order = positions(halves.forward.graph)
    order[halves.forward.graph.output_node()] = -1
    for node in halves.forward.graph.find_nodes(op="call_function", target=ops.SWAP_OUT):
        reader = last_user(node.args[0], order)
        if order[reader] > order[node]:
            _fail(halves.forward, reader, after, f"reads {node.args[0]} after {node.name} has sent it away")


# --- after insert_gradient_offload ----------------------------------------------------------------------------


def _gradients_leave_once(halves: Halves, plan: Plan, after: str) -> None:
    if halves.backward is None:
        return
    gm = halves.backward
    output = gm.graph.output_node()
    expected, returned = meta.reads(output), outputs_of(gm)
    offloads = _by_slot(gm, ops.OFFLOAD_GRAD)
    for place, parameter in halves.gradients.items():
        if not parameter.trainable:
            continue
        found = offloads.pop(parameter.slot, [])
        if len(found) != 1:
            node = found[-1] if found else output
            _fail(gm, node, after, f"the gradient of {parameter.name} reaches {len(found)} offload_grad; expected one")
        if returned[place] is not None:
            _fail(gm, output, after, f"still returns the gradient of {parameter.name}")
        gradient = _value_name(found[0].all_input_nodes[0])
        if expected is not None and gradient != expected[place]:
            _fail(gm, found[0], after, f"hands over {gradient}; the gradient of {parameter.name} is {expected[place]}")
    for node in itertools.chain.from_iterable(offloads.values()):
        _fail(gm, node, after, "offloads a gradient that no trainable parameter gets")


def _nobody_else_has_what_leaves(halves: Halves, plan: Plan, after: str) -> None:
    if halves.backward is None:
        return
    gm = halves.backward
    inputs: list[Node] = gm.graph.find_nodes(op="placeholder")
    others = {storage_of(n): n for n in [*inputs, *halves.returned("backward")]}
    for node in gm.graph.find_nodes(op="call_function", target=ops.OFFLOAD_GRAD):
        other = others.get(storage_of(node.all_input_nodes[0]))
        if other is not None:
            _fail(gm, node, after, f"hands over memory of {other.name}, to which others may write before it is read")


def _no_use_after_offload(halves: Halves, plan: Plan, after: str) -> None:
    if halves.backward is None:
        return
    order = positions(halves.backward.graph)
    offloads = _by_slot(halves.backward, ops.OFFLOAD_GRAD)
    for node in halves.backward.graph.find_nodes(op="call_function", target=ops.FETCH):
        reader = last_user(node, order)
        for offload in offloads.get(node.args[1], []):
            if order[reader] > order[offload]:
                what = f"reads the parameter of {node.name} after {offload.name} updated it"
                _fail(halves.backward, reader, after, what)


# --- after schedule -------------------------------------------------------------------------------------------


def _within_budget(halves: Halves, plan: Plan, after: str) -> None:
    held = sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE)
    for name, peak in device_peaks(halves, plan).items():
        if peak.bytes + held > plan.device_memory_bytes:
            raise VerifyError(
                f"after {after}: the {name} graph needs {peak.bytes + held} bytes of device memory at {peak.node}; "
                f"the budget is {plan.device_memory_bytes}"
            )


Check = Callable[[Halves, Plan, str], None]

CHECKS: dict[str, tuple[Check, ...]] = {
    "partition": (_lints, _hands_over, _reads_the_same, _returns_the_same, _never_replays),
    "insert_recompute": (_saves_the_plan,),
    "insert_fetches": (_only_fetch_reads_shells, _starts_are_waited_for),
    "insert_swaps": (_swaps_pair_up, _not_read_after_swap_out),
    "insert_gradient_offload": (_gradients_leave_once, _nobody_else_has_what_leaves, _no_use_after_offload),
    "schedule": (_within_budget,),
}
ORDER = tuple(CHECKS)
