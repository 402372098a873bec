"""The papers' 13B transformer as an activation graph, and LoHan's step time for it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networkx as nx

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import Activation, ActivationGraph
from tests.passes.graphs import reachable

SIZES = {"norm1": 1, "qkv": 3, "attention": 1, "proj": 1, "add": 1, "norm2": 1, "fc1": 4, "gelu": 4, "fc2": 1, "out": 1}
"""Outputs of a block in units u = 2bsh bytes (mechanisms B4)."""
MATMULS = {"qkv": 6, "proj": 2, "fc1": 8, "fc2": 8}
"""FLOPs of a block's matmuls in units k = bsh^2; attention has 4bs^2h."""
RESIDUAL = [("in", "norm1"), ("in", "add"), ("proj", "add"), ("add", "norm2"), ("add", "out"), ("fc2", "out")]
PATH = [
    ("norm1", "qkv"),
    ("qkv", "attention"),
    ("attention", "proj"),
    ("norm2", "fc1"),
    ("fc1", "gelu"),
    ("gelu", "fc2"),
]
READ_BY_BACKWARD = ("norm1", "qkv", "attention", "add", "norm2", "fc1", "gelu", "out")
HIDDEN, BLOCKS, LENGTH, VOCABULARY = 5120, 40, 1024, 50257
PARAMETERS = 13e9


def machine(*, flops_per_s: float = 164e12, link: float = 21.2e9, ssd: float = 28e9) -> HardwareProfile:
    """LoHan's server at these rates (by default F2 of mechanisms d2); the processor never binds, as in Eq. 5."""
    server = HardwareProfile.preset("rtx4090-12xP5510")
    drive = replace(server.nvme[0], read_bytes_per_s=ssd, write_bytes_per_s=ssd, mixed_bytes_per_s=ssd)
    return replace(
        server,
        matmul_flops_per_s={"float16": flops_per_s},
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        nvme=(drive,),
        adam_parameters_per_s=1e15,
        host_memory_bytes_per_s=1e18,
    )


class Transformer:
    """The 13B model at one batch size; the blocks' outputs are mandatory and tensors of their own.

    As printed in the paper, every layer's output has to be there in the backward and costs its matmul (accounting B of
    mechanisms c3.5). ``as_captured``: only what the backward really reads is needed, ops read what they really read,
    and pointwise ops cost their memory time.
    """

    def __init__(self, batch: int, hw: HardwareProfile, *, host_bytes: int = 0, as_captured: bool = False) -> None:
        tokens, rate = batch * LENGTH, hw.matmul_flops_per_s["float16"]
        unit = 2 * tokens * HIDDEN
        work = {layer: k * tokens * HIDDEN**2 for layer, k in MATMULS.items()}
        work["attention"] = 4 * tokens * LENGTH * HIDDEN
        graph: nx.DiGraph = nx.DiGraph()
        names = [f"{layer}.{block}" for block, layer in itertools.product(range(BLOCKS), SIZES)]
        graph.add_nodes_from(names)
        if as_captured:
            for block, (source, user) in itertools.product(range(BLOCKS), RESIDUAL + PATH):
                before = f"out.{block - 1}" if source == "in" else f"{source}.{block}"
                graph.add_edges_from([(before, f"{user}.{block}")] if before in graph else [])
        else:
            nx.add_path(graph, names)
        layers = {name: name.partition(".")[0] for name in names}
        memory_s = 2 * unit / hw.memory_bytes_per_s if as_captured else 0.0
        self.graph = ActivationGraph(
            graph=graph,
            flops={name: work.get(layer, 0) for name, layer in layers.items()},
            seconds={n: max(work.get(layer, 0) / rate, SIZES[layer] * memory_s) for n, layer in layers.items()},
            activations={n: Activation(n, layer, n, "", "Block", SIZES[layer] * unit) for n, layer in layers.items()},
            needed=frozenset(n for n, layer in layers.items() if not as_captured or layer in READ_BY_BACKWARD),
            mandatory=frozenset(f"out.{block}" for block in range(BLOCKS)),
        )
        self.unit_bytes, self.hw, self.host_bytes = unit, hw, host_bytes
        self.head_s = 2 * tokens * HIDDEN * VOCABULARY / rate
        self.forward_s = sum(work.values()) * BLOCKS / rate + self.head_s

    def step_s(self, saved_bytes: int, recompute_s: float) -> float:
        """LoHan's T_iter, with the LM head recomputed as there (mechanisms c3.6)."""
        work = cost.Work(
            forward_s=self.forward_s,
            backward_s=2 * self.forward_s,
            recompute_s=recompute_s + self.head_s,
            fetched_forward_bytes=int(2 * PARAMETERS),
            fetched_forward_nvme_bytes=int(2 * PARAMETERS),
            fetched_backward_bytes=int(2 * PARAMETERS),
            fetched_backward_nvme_bytes=int(2 * PARAMETERS),
            swapped_bytes=saved_bytes,
            swapped_nvme_bytes=max(0, saved_bytes - self.host_bytes),
            gradient_bytes=int(2 * PARAMETERS),
            state_read_bytes=int(12 * PARAMETERS),
            state_write_bytes=int(14 * PARAMETERS),
            adam_parameters=int(PARAMETERS),
        )
        return cost.forward_stage(work, self.hw).seconds + cost.backward_stage(work, self.hw).seconds

    def best_pattern_s(self) -> float:
        """The fastest step of those in which every block saves the same layers, by trying all sets of layers."""
        block = [f"{layer}.1" for layer in SIZES]
        inside = self.graph.graph.subgraph(block)
        alone = replace(self.graph, graph=inside, needed=self.graph.needed & set(block))
        free = [name for name in block if name != "out.1"]
        sets = itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(len(free) + 1))
        return min(self._pattern_s(alone, {"out.1", *chosen}) for chosen in sets)

    def _pattern_s(self, block: ActivationGraph, saved: set[str]) -> float:
        saved_bytes = sum(block.activations[name].bytes for name in saved)
        return self.step_s(BLOCKS * saved_bytes, BLOCKS * sum(block.seconds[name] for name in reachable(block, saved)))
