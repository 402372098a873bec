"""meta_capture: the joint graph and the plan of a model that never was, with equal blocks traced once."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from lohan_fx.capture import FLAT
from lohan_fx.errors import CaptureError
from lohan_fx.forecasting.equal_blocks import equal_blocks
from lohan_fx.forecasting.forecast import Asked, make_request
from lohan_fx.forecasting.meta_capture import MetaCapture, meta_capture
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.dit import example_inputs
from lohan_fx.models.model_families import Family, ModelDims, build
from lohan_fx.models.model_presets import named
from lohan_fx.parameters.shell import Shell
from lohan_fx.passes.liveness import peaks
from lohan_fx.pipeline import plan_training
from lohan_fx.plan import Plan
from lohan_fx.planning.budgets import MIB, make_budgets
from lohan_fx.process_memory import rss_bytes
from tests.passes.test_unroll_blocks import described

GPU = HardwareProfile.preset("rtx4090-12xP5510")
SMALL = {
    "gpt2": ModelDims("g", Family.GPT2, 8, 64, 2, "test", vocab=512, positions=64, tied=True),
    "llama": ModelDims("l", Family.LLAMA, 8, 64, 4, "test", kv_heads=2, ffn=96, vocab=512, positions=64),
    "dit": ModelDims("d", Family.DIT, 8, 64, 2, "test", image=128, patch=2, classes=10),
}


def tokens(batch: int = 2, length: int = 32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(batch, length, dtype=torch.long) for name in ("input_ids", "labels")}


def inputs_of(dims: ModelDims) -> dict[str, torch.Tensor]:
    return example_inputs(2, dims.image // 8) if dims.family is Family.DIT else tokens()


def capture(dims: ModelDims, *, layers: int | None = None, unroll: bool = True) -> MetaCapture:
    return meta_capture(build(dims, layers), inputs_of(dims), compute_dtype=torch.bfloat16, unroll=unroll)


@pytest.fixture(scope="module", params=SMALL)
def both(request: pytest.FixtureRequest) -> tuple[MetaCapture, MetaCapture]:
    """One model of 8 blocks, captured whole and unrolled."""
    dims = SMALL[request.param]
    return capture(dims, unroll=False), capture(dims)


# --- folded and unfolded --------------------------------------------------------------------------------------


def test_the_unrolled_graph_is_the_traced_one(both: tuple[MetaCapture, MetaCapture]) -> None:
    whole, folded = both
    assert folded.notes == () and folded.traced_nodes < whole.traced_nodes == len(whole.joint.graph.nodes)
    names = [{k: p.name for k, p in found.parameters.items()} for found in both]
    assert described(folded.joint, names[1]) == described(whole.joint, names[0])
    assert folded.parameters == whole.parameters
    assert (folded.facts, folded.num_outputs) == (whole.facts, whole.num_outputs)


def decisions(plan: Plan) -> list[tuple[object, ...]]:
    """What is decided, in the order of the graph; names of nodes are the tracer's and may differ."""
    return [(a.op, a.layer, a.layer_kind, a.bytes, a.flops, a.mandatory, str(a.decision)) for a in plan.activations]


def planned(found: MetaCapture, policy: str, device: int) -> tuple[Plan, dict[str, tuple[int, int]]]:
    request = make_request(found, Asked(GPU, policy=policy))
    budgets = replace(make_budgets(GPU, 2**33, device, request.windows, len(found.facts)), fixed_bytes=0)
    windows = replace(request.windows, fetch_bytes=MIB, swap_in_bytes=MIB, gradient_bytes=MIB)
    halves, plan = plan_training(
        found.joint,
        replace(request, budgets=budgets, windows=windows),
        num_outputs=found.num_outputs,
        parameters=found.parameters,
    )
    return plan, {name: (peak.bytes, peak.end_bytes) for name, peak in peaks(halves, plan).items()}


@pytest.mark.parametrize(
    ("policy", "device"), [("lohan", 2**33), ("lohan", 6 * MIB), ("recompute", 2**30), ("swap-nvme", 2**30)]
)
def test_the_plan_of_the_unrolled_graph_is_that_of_the_traced_one(
    both: tuple[MetaCapture, MetaCapture], policy: str, device: int
) -> None:
    (whole, whole_peaks), (folded, folded_peaks) = (planned(found, policy, device) for found in both)
    assert decisions(folded) == decisions(whole)
    if device == 6 * MIB:
        assert len({str(a.decision) for a in folded.activations}) > 1
    assert folded.parameters == whole.parameters
    assert folded_peaks == whole_peaks
    assert folded.prediction is not None and whole.prediction is not None
    ours, theirs = (dataclasses.asdict(p.prediction) for p in (folded, whole))
    for name in ("peak_bytes", "nvme_read_bytes", "nvme_write_bytes", "flops", "recompute_flops"):
        assert ours[name] == theirs[name]
    # Sums of the same numbers; sets of names have another order where the names are others.
    for stage in ("forward", "backward"):
        assert ours[stage]["lanes_s"] == pytest.approx(theirs[stage]["lanes_s"], rel=1e-9)


def test_tracing_does_not_grow_with_depth() -> None:
    found = [capture(SMALL["gpt2"], layers=layers) for layers in (12, 96)]
    assert found[0].traced_nodes == found[1].traced_nodes
    growth = len(found[1].joint.graph.nodes) - len(found[0].joint.graph.nodes)
    assert growth % 84 == 0 and growth > 0


# --- without memory -------------------------------------------------------------------------------------------


def test_no_parameter_of_a_huge_model_is_ever_in_memory() -> None:
    capture(SMALL["gpt2"])  # whatever the first capture of a process loads
    before = rss_bytes()
    found = meta_capture(build(named("gpt3-412b")), tokens(8, 1024), compute_dtype=torch.bfloat16)
    assert sum(fact.numel for fact in found.facts) == named("gpt3-412b").parameters
    assert rss_bytes() - before < 400 * MIB


def test_facts_are_in_the_order_of_the_model_and_slots_point_there() -> None:
    found = capture(SMALL["llama"])
    names = [name for name, _ in build(SMALL["llama"]).named_parameters()]
    assert [fact.name for fact in found.facts] == names
    assert {p.name: p.slot for p in found.parameters.values()} == {name: slot for slot, name in enumerate(names)}
    assert all(fact.bytes == 2 * fact.numel for fact in found.facts)


# --- what cannot be folded ------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Linear layers, one after the other."""

    def __init__(self, layers: int = 7, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x.to(layer.weight.dtype)))
        return x.mean()


class Uneven(Stack):
    """The last layer has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1] = nn.Linear(8, 8, bias=False)


class Indexed(Stack):
    """Reads a block by its number, of which a truncated model has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.layers[6]
        return super().forward(x + last(x.to(last.weight.dtype)))


class Weighed(Stack):
    """Takes the outputs of all blocks together, by a weight for each: fewer blocks are an error of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = [layer(x.to(layer.weight.dtype)) for layer in self.layers]
        return (torch.stack(hidden) * self.weights.view(7, 1, 1)).mean()


class Flat(nn.Module):
    """No list of blocks at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x.to(self.first.weight.dtype)).mean()


class Block(nn.Module):
    """A linear layer, and what ``made`` makes."""

    def __init__(self, number: int, made: Callable[[int], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.setting = made(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x.to(self.linear.weight.dtype)))


class Blocks(nn.Module):
    """Blocks one after the other; with ``borrows``, after the weight of the first one."""

    def __init__(self, made: Callable[[int], Any] = lambda number: None, *, borrows: bool = False) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Block(number, made) for number in range(7))
        self.borrows = borrows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.borrows:
            weight = self.layers[0].linear.weight
            x = x.to(weight.dtype) @ weight
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def sharing(*shared: tuple[int, int]) -> Blocks:
    """The second of each pair of blocks has the weight of the first."""
    model = Blocks()
    for first, second in shared:
        model.layers[second].linear.weight = model.layers[first].linear.weight
    return model


class MarkedBlock(Block):
    """To be compiled once for all calls of it."""

    @torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def of_vectors(model: nn.Module) -> MetaCapture:
    return meta_capture(model, {"x": torch.zeros(2, 8)}, compute_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (Uneven, "layers.6 is not built like layers.0"),
        (Indexed, "every block was traced"),
        (Weighed, "every block was traced: the first 5 alone fail: RuntimeError("),
        (Flat, "no list of blocks"),
    ],
)
def test_a_model_whose_blocks_are_not_equal_is_traced_whole(model: type[nn.Module], note: str) -> None:
    torch._dynamo.reset()
    found = of_vectors(model())
    assert len(found.notes) == 1 and note in found.notes[0]
    assert found.traced_nodes == len(found.joint.graph.nodes)
    assert {p.name for p in found.parameters.values()} == {name for name, _ in model().named_parameters()}


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (
            functools.partial(sharing, (0, 1), (2, 3), (4, 5)),
            "layers.1.linear.weight is a parameter of more than its block",
        ),
        (functools.partial(sharing, (5, 6)), "layers.6.linear.weight is a parameter of more than its block"),
        (functools.partial(Blocks, borrows=True), "layers.0.linear.weight is read outside of its block"),
    ],
    ids=["neighbours", "beyond the fifth", "outside"],
)
def test_blocks_that_do_not_have_their_parameters_for_themselves(make: Callable[[], Blocks], note: str) -> None:
    torch._dynamo.reset()
    found = of_vectors(make())
    assert found.notes == (f"every block was traced: {note}",)
    names = [name for name, _ in make().named_parameters()]
    assert {p.name: p.slot for p in found.parameters.values()} == {name: slot for slot, name in enumerate(names)}


@pytest.mark.skipif(not FLAT, reason="this version of PyTorch leaves marked layers graphs of their own")
def test_blocks_marked_to_be_compiled_once_are_traced_whole() -> None:
    marked = Blocks()
    marked.layers = nn.ModuleList(MarkedBlock(number, lambda number: None) for number in range(7))
    found, expected = of_vectors(marked), of_vectors(Blocks())
    # PyTorch says of all of them that they are in the first one.
    assert found.notes == ("every block was traced: layers.2 computes nothing by itself",) and expected.notes == ()
    targets = [
        [node.target for node in each.joint.graph.nodes if node.op == "call_function"] for each in (found, expected)
    ]
    assert targets[0] == targets[1]
    assert found.parameters == expected.parameters


def test_blocks_that_differ_in_a_setting_are_not_equal() -> None:
    model = nn.Sequential()
    model.blocks = nn.ModuleList(nn.Dropout(rate) for rate in (0.1, 0.1, 0.2))
    assert equal_blocks(model)[0] is None
    assert "blocks.2 is not built like blocks.0" in equal_blocks(model)[1]


def test_what_is_wrong_with_all_blocks_is_said_as_it_is() -> None:
    with pytest.raises(TorchDynamoException, match="same reduction dim"):
        meta_capture(Stack(), {"x": torch.zeros(2, 7)}, compute_dtype=torch.bfloat16)


class Kind(enum.Enum):
    ONE = 1
    OTHER = 2


@dataclass
class Config:
    rate: float


def of_last(usual: Any, last: Any) -> Callable[[int], Any]:
    """Another setting for the last block, which is not among those that are traced."""
    return lambda number: last if number == 6 else usual


@pytest.mark.parametrize(
    "made",
    [
        of_last([1], [1, 1]),
        of_last((1, [2]), (1, [3])),
        of_last({"a": 1}, {"a": 1.0}),
        of_last({"a": 1}, {"b": 1}),
        of_last({1}, {2}),
        of_last(Kind.ONE, Kind.OTHER),
        of_last(torch.relu, torch.tanh),
        of_last(functools.partial(pow, 2), functools.partial(pow, 3)),
        of_last(Config(0.1), Config(0.2)),
        of_last([nn.ReLU()], [nn.Tanh()]),
        of_last(torch.zeros(2), torch.zeros(3)),
        lambda number: lambda x: x * number,
        lambda number: object(),
    ],
)
def test_blocks_that_differ_in_what_is_no_plain_setting_are_not_equal(made: Callable[[int], Any]) -> None:
    found, why_not = equal_blocks(Blocks(made))
    assert found is None and " is not built like layers.0" in why_not


class Indirect(Block):
    """Holds a method of its own, its own layer in a list, and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number, lambda _: [{"a": (1, None)}, Kind.ONE, Config(0.1), torch.zeros(2), {3}])
        self.layer_idx = number
        self.run = self.forward
        self.held = [self.linear, functools.partial(self.linear.forward)]


def test_blocks_that_hold_the_same_each_for_itself_are_equal() -> None:
    model = Blocks()
    model.layers = nn.ModuleList(Indirect(number) for number in range(7))
    assert equal_blocks(model)[0] is not None
    model.layers[6].held = [model.layers[0].linear, model.layers[6].held[1]]
    assert equal_blocks(model)[0] is None


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "mixtral", "vit"])
def test_blocks_of_hugging_face_are_equal(kind: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[kind](**sizes))
    assert equal_blocks(model)[0] is not None


def test_few_blocks_are_simply_traced() -> None:
    found = of_vectors(Stack(3))
    assert found.notes == () and found.traced_nodes == len(found.joint.graph.nodes)


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="nothing to train"):
        of_vectors(Stack(frozen=True))


def test_the_model_is_left_with_shells_that_hold_nothing() -> None:
    model: Any = Stack(2)
    of_vectors(model)
    shells = list(model.parameters())
    assert all(isinstance(p, Shell) for p in shells)
    with torch._C.DisableTorchFunctionSubclass():
        assert all(p.untyped_storage().nbytes() == 0 for p in shells)
