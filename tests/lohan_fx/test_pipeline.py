"""pipeline: from a captured graph and a request to linked halves, a plan and a prediction that is true."""

from __future__ import annotations

import copy
import gc
import re
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lohan_fx import meta, ops, pipeline
from lohan_fx.buffered import boxed, linked
from lohan_fx.errors import InfeasiblePlan, VerifyError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes import assign_buffers
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.halves import Halves, ParameterInput
from lohan_fx.passes.liveness import device_peaks
from lohan_fx.passes.traffic import PAGE_BYTES, padding_bytes
from lohan_fx.passes.verify import ORDER
from lohan_fx.pipeline import PASSES, compile_inference, compile_training, replan
from lohan_fx.plan import Keep, Plan, Recompute, Swap, Tier, Use
from lohan_fx.planning import plan_search, predict, problem
from lohan_fx.planning.budgets import MIB, choose_windows, make_budgets
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.planning.problem import ParameterFacts
from lohan_fx.policies import POLICIES
from lohan_fx.request import Request
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.workspace import Workspace
from tests.exhaustive import combinations
from tests.passes import graphs
from tests.passes.fake_runtime import FakeRuntime, bound, eager, forward_inputs, run
from tests.passes.graphs import Captured, captured, graph_of, nodes, plan_for, rewrite

GPU = HardwareProfile.preset("rtx4090-12xP5510")
GIB = 1 << 30


def facts(found: Captured) -> tuple[ParameterFacts, ...]:
    values = found.parameter_values()
    return tuple(
        ParameterFacts(p.name, values[p.slot].numel(), values[p.slot].nbytes, p.trainable)
        for p in sorted(found.parameters.values(), key=lambda p: p.slot)
    )


def request(found: Captured, *, host: int = 8 * GIB, policy: str = "lohan", plan: Plan | None = None) -> Request:
    """What ``compile`` would ask for on a machine whose device is the processor."""
    hw = replace(GPU, device="cpu")
    windows = choose_windows(host, facts(found))
    return Request(
        hw=hw,
        policy=policy,
        compute_dtype="float32",
        matmul_rate=hw.matmul_flops_per_s["float32"],
        parameters=facts(found),
        budgets=make_budgets(hw, host, None, windows),
        windows=windows,
        plan=plan,
    )


def trained(found: Captured, asked: Request) -> tuple[Halves, Plan]:
    return compile_training(
        found.joint,
        asked,
        num_outputs=found.num_outputs,
        parameters=found.parameters,
        activation_slots=lambda count: range(graphs.FIRST_ACTIVATION_SLOT, graphs.FIRST_ACTIVATION_SLOT + count),
    )


# --- training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), combinations(list(graphs.MODELS), list(POLICIES)))
def test_compiled_halves_compute_what_the_model_does(name: str, policy: str) -> None:
    found = captured(name)
    halves, plan = trained(found, request(found, policy=policy))
    assert plan.policy == policy
    assert run(halves, found).equals(eager(found))


def test_the_passes_are_those_that_the_verifier_and_our_tests_know() -> None:
    assert PASSES == graphs.PASSES
    assert ("partition", *(apply.__name__ for apply in PASSES)) == ORDER


def test_every_pass_is_verified_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured("two-layers")
    verified: list[str] = []
    monkeypatch.setattr(pipeline, "verify", lambda halves, plan, *, after: verified.append(after))
    trained(found, request(found, plan=graphs.plan_for(found, Keep())))
    assert tuple(verified) == ORDER


def test_a_pass_that_breaks_the_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert_swaps(halves: Halves, plan: Plan) -> None:
        (wait, *_) = nodes(halves.forward, ops.WAIT)
        wait.replace_all_uses_with(wait.all_input_nodes[0])
        halves.forward.graph.erase_node(wait)

    found = captured("two-layers")
    broken = tuple(insert_swaps if apply.__name__ == "insert_swaps" else apply for apply in PASSES)
    monkeypatch.setattr(pipeline, "PASSES", broken)
    with pytest.raises(VerifyError, match=r"^after insert_swaps: t: reads \('fetch_first_weight before its wait',\)"):
        trained(found, request(found))


def test_a_given_plan_is_obeyed() -> None:
    found = captured("transformer")
    given = graphs.plan_for(found, graphs.mixed(found))
    halves, plan = trained(found, request(found, plan=given))
    assert replace(plan, prediction=None) == given
    swapped = {meta.origin(n) for n in nodes(halves.forward, ops.SWAP_OUT)}
    assert swapped and all(isinstance(given.decision(str(name)), Swap) for name in swapped)


@pytest.mark.parametrize("clearing_s_per_byte", [1e-15, 1e-3])
@pytest.mark.parametrize("ample", [False, True])
def test_memory_is_left_to_values_where_clearing_theirs_would_take_longer(
    clearing_s_per_byte: float, ample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assign_buffers, "SIZES", (range(1, sys.maxsize),))
    monkeypatch.setattr(assign_buffers, "_MAPPED_BYTES", 0)
    monkeypatch.setattr(predict, "BUFFERS_ROOM_BYTES", 0)
    monkeypatch.setattr(plan_search, "BUFFERS_ROOM_BYTES", 0)
    found = captured("transformer")
    asked = request(found)
    asked = replace(asked, hw=replace(asked.hw, clearing_s_per_byte=clearing_s_per_byte), chooses_staging=False)
    placed, roomy = trained(found, asked)
    assert roomy.prediction is not None
    all_bytes = roomy.prediction.peak_bytes["host"]
    cleared_bytes = assign_buffers.cleared_bytes(placed, placed.assigned)
    if not ample:  # a little less than keeping all would take
        asked = replace(asked, budgets=replace(asked.budgets, host_memory_bytes=all_bytes - (8 << 10)))
    halves, plan = trained(found, asked)
    assert plan.division is not None and plan.prediction is not None
    reserved = plan.division.bytes_of(Tier.HOST, Use.PLACES)
    assert bool(reserved) is (clearing_s_per_byte > 1e-6)
    shares = [share for share in plan.division.shares if share.tier is Tier.HOST]
    assert all(share.bytes >= 0 for share in shares)
    assert sum(share.bytes for share in shares) == plan.host_memory_bytes
    assert plan.prediction.peak_bytes["host"] <= plan.host_memory_bytes
    left_bytes = sum(meta.cost(n).cleared_bytes for _, gm in halves.graphs() for n in gm.graph.nodes)
    if reserved:
        assert any(one.offsets for one in halves.assigned.values())
        assert left_bytes == cleared_bytes  # of what is returned, which has no place in any plan
    # Planned anew, from graphs that are shared between the plans tried, it is the same.
    again = replan(found.joint, found.num_outputs, found.parameters, asked)
    assert again.prediction == plan.prediction and again.division == plan.division
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_given_plan_that_breaks_the_promise_is_refused_by_tier(tier: str) -> None:
    found = captured("transformer")
    given = graphs.plan_for(found, Keep(), home=Tier.DEVICE)
    _, plan = trained(found, request(found, plan=given))
    assert plan.prediction is not None
    needed = plan.prediction.peak_bytes[tier]
    budget = f"{tier}_memory_bytes"
    trained(found, request(found, plan=replace(given, **{budget: needed})))  # type: ignore[arg-type]
    too_small = replace(given, **{budget: needed - 1})  # type: ignore[arg-type]
    with pytest.raises(InfeasiblePlan, match=f"more memory than was promised: {tier}_memory is 1 bytes short"):
        trained(found, request(found, plan=too_small))


# --- the prediction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two-layers", "dropout", "branches"])
@pytest.mark.parametrize("decision", [Keep(), Recompute()])
def test_predicted_flops_are_those_that_pytorch_counts(name: str, decision: Keep | Recompute) -> None:
    found, graph = captured(name), graph_of(captured(name))
    given = graphs.plan_for(found, decision)
    _, plan = trained(found, request(found, plan=given))
    counter = FlopCounterMode(display=False, custom_mapping=graphs.CPU_ATTENTION)
    with counter:
        eager(found)
    assert plan.prediction is not None
    assert plan.prediction.flops == counter.get_total_flops()
    saved = {a.node for a in given.activations if not isinstance(a.decision, Recompute)}
    assert plan.prediction.recompute_flops == sum(graph.flops[name] for name in closure(graph, saved))
    assert (plan.prediction.recompute_flops > 0) is (decision == Recompute())


def test_predicted_bytes_are_those_that_the_nodes_move() -> None:
    found = captured("transformer")
    given = graphs.plan_for(found, Swap(Tier.NVME))
    halves, plan = trained(found, request(found, plan=given))
    assert plan.prediction is not None and halves.backward is not None
    swapped = sum(meta.cost(n.all_input_nodes[0]).bytes for n in nodes(halves.forward, ops.SWAP_OUT))
    fetched = sum(meta.cost(n).bytes for _, gm in halves.graphs() for n in nodes(gm, ops.FETCH))
    states = 12 * sum(p.numel for p in facts(found))
    more_read, more_written = padding_bytes(halves, plan)
    assert plan.prediction.nvme_read_bytes == fetched + swapped + states + more_read
    assert plan.prediction.nvme_write_bytes == swapped + states + more_written
    assert plan.prediction.nvme_read_bytes % PAGE_BYTES == plan.prediction.nvme_write_bytes % PAGE_BYTES == 0


@pytest.mark.parametrize("home", [Tier.NVME, Tier.DEVICE])
def test_predicted_peaks_hold_graphs_parameters_states_and_staging(home: Tier) -> None:
    found = captured("transformer")
    given = graphs.plan_for(found, Keep(), home=home)
    asked = replace(request(found, plan=given), windows=given.windows)
    halves, plan = trained(found, asked)
    elements = sum(p.numel for p in facts(found))
    graph = max(peak.bytes for peak in device_peaks(halves, plan).values())
    device = graph + (4 * elements if home is Tier.DEVICE else 0)
    host = device + asked.budgets.fixed_bytes + (8 * elements if home is Tier.DEVICE else 0)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes == {"device": device, "host": host}


@pytest.mark.parametrize("policy", ["lohan", "recompute"])
def test_a_plan_has_room_for_what_kernels_take_while_they_run(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found as ops are timed, on the captured graph; also where an op runs again in the backward."""

    def noted(gm: GraphModule, device: torch.device) -> None:
        for node in graphs.nodes(gm, torch.ops.aten.mm.default):
            meta.set_cost(node, replace(meta.cost(node), scratch_bytes=taken))

    monkeypatch.setattr(HardwareProfile, "is_this_machine", lambda hw: True)
    monkeypatch.setattr(pipeline, "time_ops", noted)
    found = replace(captured("transformer"), joint=copy.deepcopy(captured("transformer").joint))
    peaks = {}
    for taken in (0, 1 << 30):
        halves, plan = trained(found, request(found, policy=policy))
        assert plan.prediction is not None
        peaks[taken] = plan.prediction.peak_bytes["host"]
        again = [n for n in graphs.nodes(graphs.both(halves)[1], torch.ops.aten.mm.default) if meta.is_recomputed(n)]
        assert (again or policy != "recompute") and all(meta.cost(n).scratch_bytes == taken for n in again)
    assert 1 << 30 >= peaks[1 << 30] - peaks[0] > (1 << 30) - (1 << 20)  # values that died by then had taken less
    with pytest.raises(InfeasiblePlan, match="would fit"):
        trained(found, request(found, policy=policy, host=1 << 30))


def test_less_memory_means_more_traffic_and_no_faster_step() -> None:
    found = captured("transformer")
    plans = [trained(found, request(found, host=host))[1] for host in (8 * GIB, 200 * MIB)]
    roomy, tight = (plan.prediction for plan in plans)
    assert roomy is not None and tight is not None
    assert roomy.nvme_read_bytes == 0
    assert tight.step_s >= roomy.step_s


# --- refusals -------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Two matrices of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(2048, 8192, bias=False), nn.Linear(8192, 2048, bias=False)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.relu(self.layers[0](x))).sum()


@pytest.fixture(scope="module")
def wide() -> Captured:
    return graphs.capture(Wide(), torch.zeros(16, 2048))


@pytest.mark.parametrize("host", [200, 260, 320, 380, 440])
@pytest.mark.parametrize("policy", ["lohan", "in-memory", "recompute"])
def test_the_promise_that_a_refusal_names_is_enough(wide: Captured, host: int, policy: str) -> None:
    """With the windows and staging that ``compile`` chooses for it, which a larger promise makes larger."""
    asked = host * MIB
    try:
        _, plan = trained(wide, request(wide, host=asked, policy=policy))
    except InfeasiblePlan as error:
        found = re.search(r"host_memory=([\d,]+) would fit", str(error))
        assert found, error
        asked = int(found[1].replace(",", ""))
        _, plan = trained(wide, request(wide, host=asked, policy=policy))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes["host"] <= asked


# --- inference ------------------------------------------------------------------------------------------------


def captured_inference(model: nn.Module, *inputs: torch.Tensor) -> tuple[GraphModule, list[Any]]:
    """The graph that AOTAutograd makes of ``model`` without gradients, and its inputs."""
    found: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        def record(graph: GraphModule, _: Any) -> Any:
            found.append((graph, list(examples)))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=record, inference_compiler=record)(gm, examples)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def evaluation(found: Captured) -> tuple[GraphModule, Captured]:
    """The graph of a call of ``found``'s model without gradients, and its inputs and parameters as that graph names them."""
    gm, examples = captured_inference(found.model, *found.inputs)
    names = {id(p): name for name, p in found.model.named_parameters()}
    slots = {p.name: p.slot for p in found.parameters.values()}
    values = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), examples, strict=True))
    parameters = {
        name: ParameterInput(slots[names[id(value)]], names[id(value)], trainable=True)
        for name, value in values.items()
        if id(value) in names
    }
    return gm, replace(found, values=values, parameters=parameters)


def assert_evaluates(halves: Halves, inference: Captured) -> None:
    with bound(halves, FakeRuntime(inference.parameter_values())), torch.no_grad():
        outputs = linked(halves.forward, None, Workspace(), 0, Room())(forward_inputs(inference, shells=True))
        assert torch.equal(outputs[0], inference.model(*inference.inputs))


@pytest.mark.parametrize("policy", ["lohan", "swap-nvme"])
def test_inference_streams_parameters_and_computes_what_the_model_does(policy: str) -> None:
    found = captured("transformer")
    gm, inference = evaluation(found)
    halves, plan = compile_inference(gm, request(found, policy=policy), parameters=inference.parameters)
    assert halves.backward is None and plan.activations == ()
    assert len(nodes(halves.forward, ops.FETCH)) == len(inference.parameters)
    assert plan.prediction is not None and plan.prediction.backward.lanes_s["d2h"] == 0
    assert_evaluates(halves, inference)


def test_inference_fetches_less_far_ahead_where_memory_is_short_and_is_refused_where_it_is_too_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problem, "SMALL_PARAMETER_ELEMENTS", 0)
    found = captured("transformer")

    def compiled_within(device_bytes: int) -> tuple[Halves, Plan, Captured]:
        gm, inference = evaluation(found)
        asked = request(found, policy="swap-nvme")
        asked = replace(
            asked,
            windows=replace(asked.windows, fetch_bytes=GIB),
            budgets=replace(asked.budgets, device_memory_bytes=device_bytes),
        )
        return *compile_inference(gm, asked, parameters=inference.parameters), inference

    halves, ample, _ = compiled_within(GIB)
    most = device_peaks(halves, ample)["forward"].bytes + resident_bytes(ample)[0]
    halves, plan, inference = compiled_within(most - 1)
    assert plan.windows.fetch_bytes < ample.windows.fetch_bytes
    assert_evaluates(halves, inference)
    message = r"a call of this model without gradients needs .* device_memory is [\d,]+ bytes short"
    with pytest.raises(InfeasiblePlan, match=message) as refusal:
        compiled_within(most // 8)
    (short,) = re.findall(r"([\d,]+) bytes short", str(refusal.value))
    least = most // 8 + int(short.replace(",", ""))
    halves, plan, inference = compiled_within(least)
    assert plan.windows.fetch_bytes == 0
    assert_evaluates(halves, inference)
    with pytest.raises(InfeasiblePlan, match="device_memory is 1 bytes short"):
        compiled_within(least - 1)


# --- boxed ----------------------------------------------------------------------------------------------------


def test_a_boxed_graph_gives_up_its_inputs_at_their_last_use() -> None:
    seen: list[bool] = []

    def look() -> None:
        gc.collect()
        seen.append(reference() is not None)

    gm = make_fx(lambda x: (x.relu().sin(),))(torch.ones(3))
    relu, sine = (n for n in gm.graph.nodes if n.op == "call_function")
    for before in (sine, gm.graph.output_node()):
        with gm.graph.inserting_before(before):
            gm.graph.call_function(look)
    x = torch.ones(3)
    reference = weakref.ref(x)
    arguments: list[object] = [x]
    del x
    assert torch.equal(boxed(gm)(arguments)[0], torch.ones(3).sin())  # type: ignore[index]
    assert arguments == []
    assert seen == [False, False]
    assert relu.users


def test_what_is_linked_calls_our_ops_without_the_dispatcher_and_the_graph_still_shows_them() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, {}))
    kinds = [n.target for n in halves.forward.graph.nodes if n.op == "call_function"]
    assert ops.FETCH in kinds and ops.WAIT in kinds
    with bound(halves, FakeRuntime(found.parameter_values())), torch.no_grad(), CountOps() as counted:
        outputs = linked(halves.forward, None, Workspace(), 0, Room())(forward_inputs(found, shells=True))
        assert torch.equal(outputs[0], found.model(*found.inputs))
    assert counted.seen and not any(op.startswith("lohan") for op in counted.seen)
    assert [n.target for n in halves.forward.graph.nodes if n.op == "call_function"] == kinds


class CountOps(TorchDispatchMode):
    """The names of the ops that the dispatcher was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))
