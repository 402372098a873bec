"""Small models on the CPU, their joint graphs as AOTAutograd makes them, and their halves as the passes make them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule, Node
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lohan_fx import meta
from lohan_fx.meta import Cost
from lohan_fx.passes.activation_graph import ActivationGraph, activation_graph
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, Pass
from lohan_fx.passes.insert_fetches import insert_fetches
from lohan_fx.passes.insert_gradient_offload import insert_gradient_offload
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.insert_swaps import insert_swaps
from lohan_fx.passes.partition import partition
from lohan_fx.passes.schedule import schedule
from lohan_fx.passes.search import useful
from lohan_fx.passes.verify import verify
from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Keep,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Recompute,
    Swap,
    Tier,
    Windows,
)

PASSES: tuple[Pass, ...] = (insert_recompute, insert_fetches, insert_swaps, insert_gradient_offload, schedule)
FIRST_ACTIVATION_SLOT = 1000
VOCABULARY, WIDTH, HEADS = 32, 16, 2

# --- models ---------------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """The smallest model with something to save: two matmuls and a ReLU; loss is a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + dropout(self.proj(attended), self.rate)
        return x + dropout(self.fc2(gelu(self.fc1(self.norm2(x)))), self.rate)


class Transformer(nn.Module):
    """A language model of numbered blocks; its loss predicts each next token."""

    def __init__(self, *, blocks: int = 3, rate: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(rate) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Branches(nn.Module):
    """Returns a value in the middle, which the rest is computed from, beside the end; the first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = dropout(self.second(torch.tanh(self.first(x))), 0.5)
        return middle, torch.exp(torch.tanh(middle + 1).sin()).sum()


class Constants(nn.Module):
    """Its code makes tensors of numbers, which the graph holds as attributes of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * torch.tensor([0.5, 1.0, -2.0, 3.0])
        return torch.where(x > 0.0, torch.sin(self.second(x)), torch.tensor(-3.0)).sum()


# --- what AOTAutograd makes of them ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """A joint graph with the values it was captured with. ``values``: placeholder name -> tensor, parameter or size."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    joint: GraphModule
    num_outputs: int
    values: Mapping[str, Any]
    parameters: dict[str, ParameterInput]

    def parameter_values(self) -> dict[int, torch.Tensor]:
        """Slot -> value."""
        return {p.slot: self.values[name].detach() for name, p in self.parameters.items()}


def capture(model: nn.Module, *inputs: torch.Tensor, dynamic: bool = False) -> Captured:
    """The joint graph of ``model``, annotated; its parameters get slots in the order of ``named_parameters``."""
    slots = {id(p): (slot, name) for slot, (name, p) in enumerate(model.named_parameters())}
    found: list[Captured] = []

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        def record(joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
            halves = default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **keywords)
            placeholders = [n for n in joint.graph.find_nodes(op="placeholder") if n.name.startswith("primals")]
            values = {n.name: _concrete(examples[n.meta["desc"].idx]) for n in placeholders}
            parameters = {
                name: ParameterInput(*slots[id(value)], trainable=value.requires_grad)
                for name, value in values.items()
                if id(value) in slots
            }
            found.append(Captured(model, inputs, joint, num_fwd_outputs, values, parameters))
            return halves

        def boxed(graph: GraphModule, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=record)(gm, examples)

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (captured,) = found
    annotate(captured.joint)
    return captured


def forward_values(found: Captured) -> list[Any]:
    """What the forward takes, parameters as plain tensors."""
    return [v.detach() if torch.is_tensor(v) else v for v in found.values.values()]


def _concrete(value: Any) -> Any:
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value


def _tokens(batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "two-layers": lambda: (_seeded(TwoLayers), torch.linspace(-1, 1, 12).view(3, 4)),
    "transformer": lambda: (_seeded(Transformer), _tokens()),
    "dropout": lambda: (_seeded(lambda: Transformer(blocks=2, rate=0.25)), _tokens()),
    "tied": lambda: (_seeded(lambda: Transformer(blocks=1, tied=True)), _tokens()),
    "branches": lambda: (_seeded(Branches), torch.linspace(-1, 1, 12).view(3, 4)),
    "constants": lambda: (_seeded(Constants), torch.linspace(-1, 1, 12).view(3, 4)),
}


@functools.cache
def captured(name: str, *, dynamic: bool = False) -> Captured:
    """The joint graph of ``MODELS[name]``, captured once per session: whoever changes a graph takes its halves."""
    model, inputs = MODELS[name]()
    return capture(model, inputs, dynamic=dynamic)


# PyTorch's counter knows the formula of attention but not this kernel.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v)
    ),
}


# --- plans and halves of them ---------------------------------------------------------------------------------


def flops_as_seconds(cost: Cost) -> float:
    """A clock for searches: a second per FLOP, and a little for everything that is no view."""
    return 0.0 if cost.is_view else cost.flops + 1.0


def graph_of(found: Captured) -> ActivationGraph:
    return activation_graph(found.joint, num_outputs=found.num_outputs, node_seconds=flops_as_seconds)


def reachable(found: ActivationGraph, saved: Collection[str]) -> set[str]:
    """What must be recomputed, by its definition: unsaved values with a path of unsaved values to what is needed."""
    unsaved = found.graph.subgraph(set(found.graph) - set(saved))
    wanted = found.needed - set(saved)
    return set(wanted).union(*(nx.ancestors(unsaved, name) for name in wanted))


WINDOWS = Windows(
    fetch_bytes=1 << 30,
    swap_in_bytes=1 << 30,
    gradient_bytes=0,
    chunk_elements=4096,
    io_bytes=4096,
    io_buffers=1,
    optimizer_buffers=2,
    gradient_buffers=2,
    swap_out_bytes=1 << 20,
)


def plan_for(
    found: Captured,
    decision: Decision | Mapping[str, Decision],
    *,
    home: Tier = Tier.NVME,
    windows: Windows = WINDOWS,
    device_memory_bytes: int = 1 << 40,
) -> Plan:
    """A plan that does ``decision`` with every useful activation (keeping those that must be saved), or as mapped."""
    graph = graph_of(found)

    def decide(name: str) -> Decision:
        chosen = decision.get(name, Keep()) if isinstance(decision, Mapping) else decision
        return Keep() if isinstance(chosen, Recompute) and name in graph.mandatory else chosen

    activations = tuple(
        ActivationPlan(
            node=name,
            op=graph.activations[name].op,
            layer=graph.activations[name].layer,
            layer_kind=graph.activations[name].layer_kind,
            bytes=graph.activations[name].bytes,
            flops=graph.flops[graph.activations[name].producer],
            decision=decide(name),
            mandatory=name in graph.mandatory,
        )
        for name in useful(graph)
    )
    parameters = tuple(
        ParameterPlan(
            name=p.name,
            layer="",
            numel=found.values[placeholder].numel(),
            bytes=found.values[placeholder].nbytes,
            trainable=p.trainable,
            home=home,
            states_home=home if p.trainable and home is not Tier.DEVICE else Tier.HOST if p.trainable else None,
            optimizer_runs=OptimizerTiming.IN_BACKWARD if p.trainable else OptimizerTiming.NONE,
        )
        for placeholder, p in found.parameters.items()
    )
    return Plan(
        policy="test",
        device="cpu",
        compute_dtype="float32",
        host_memory_bytes=1 << 40,
        device_memory_bytes=device_memory_bytes,
        activations=activations,
        parameters=parameters,
        windows=windows,
    )


def rewrite(found: Captured, plan: Plan, *, upto: Pass | None = schedule) -> Halves:
    """The halves of ``found`` after ``partition`` and all passes up to ``upto`` (None: none), verified after each."""
    slots = range(FIRST_ACTIVATION_SLOT, FIRST_ACTIVATION_SLOT + len(plan.activations))
    halves = partition(
        found.joint, plan, num_outputs=found.num_outputs, parameters=found.parameters, activation_slots=slots
    )
    verify(halves, plan, after="partition")
    if upto is not None:
        for apply in PASSES[: PASSES.index(upto) + 1]:
            apply(halves, plan)
            verify(halves, plan, after=apply.__name__)
    return halves


def take_scratch(halves: Halves, nbytes: int) -> set[str]:
    """Let each matmul of ``halves`` take so much while it runs; their names."""
    matmuls = [n for _, gm in halves.graphs() for n in nodes(gm, torch.ops.aten.mm.default)]
    for node in matmuls:
        meta.set_cost(node, dataclasses.replace(meta.cost(node), scratch_bytes=nbytes))
    return {n.name for n in matmuls}


def mixed(found: Captured) -> dict[str, Decision]:
    """All kinds of decisions, one after the other."""
    kinds: tuple[Decision, ...] = (Recompute(), Swap(Tier.HOST), Recompute(), Keep(), Swap(Tier.NVME))
    return dict(zip(useful(graph_of(found)), itertools.cycle(kinds), strict=False))


DECISIONS: dict[str, Callable[[Captured], Decision | Mapping[str, Decision]]] = {
    "keep": lambda _: Keep(),
    "swap-host": lambda _: Swap(Tier.HOST),
    "swap-nvme": lambda _: Swap(Tier.NVME),
    "recompute": lambda _: Recompute(),
    "mixed": mixed,
}


def both(halves: Halves) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward of a training step."""
    assert halves.backward is not None
    return halves.forward, halves.backward


# --- graphs as text -------------------------------------------------------------------------------------------


def text(gm: GraphModule) -> str:
    """One line per node, in order: ``name = op(arguments)``; placeholders and the result as in a function."""
    inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    lines = [f"({', '.join(inputs)}):"]
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
        elif node.op != "placeholder":
            op = node.target.__name__.removesuffix(".default")
            lines.append(f"{node.name} = {op}{_argument(node.args)}")
    return "\n".join(lines)


def _argument(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_argument(item) for item in value)})"
    return value.name if isinstance(value, Node) else str(value)


def nodes(gm: GraphModule, op: object) -> list[Node]:
    """The calls of ``op``, in order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target is op]


def starts_with(gm: GraphModule, prefix: str) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.name.startswith(prefix)]
