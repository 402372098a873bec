"""op_times: how long each op of a captured graph takes on this machine, and what memory beside its values, measured, each
distinct one once.

A rate measured on large matmuls says little about attention, about matmuls of few rows, or about a dtype that some
kernels convert (docs/0012). So every op is run on tensors of its own shapes, strides and dtypes. Memory: one op at a
time, which needs no more than the op itself will in training. The tensors' values are made up, so an op that looks at them may
refuse (an integer division by 0): such an op has no seconds, and one that runs for its effect (an assertion) is not tried.

Only where the profile was measured on this machine; for any other one the rates of the profile speak.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from lohan_fx import meta
from lohan_fx.measuring import scratch
from lohan_fx.meta import Lane
from lohan_fx.passes.annotate import at_hint
from lohan_fx.passes.assign_buffers import LEAST_BYTES, into, is_assignable

FIRST_RUNS = 3
ROUNDS = 5
"""Over all ops: a machine's speed drifts within a second, and the seconds of an op should not be those of one moment."""
ROUND_S = 1.0
"""Of each round after the first, divided by what the ops add to the graph."""
MOST_RUNS = 9
"""Of an op in a round."""
WORTH_STEPS = 12
"""Times the graph's own seconds that all rounds after the first may take, but for one run of each op in each: of a small model's
op most of a run is what makes its inputs cold, and nobody wants to wait longer for a prediction than for what it says."""
LONG_S = 0.5
"""A run of so many seconds is no single moment: one after the first is enough. Without kernels for a dtype it may take many."""
NEGLIGIBLE = 0.002
"""Share of the graph's seconds below which an op's first runs are enough."""
HICCUP = 3.0
"""A run counts for at most so many times the median one. Otherwise the mean counts, since that is what a sum of many nodes
is made of: whatever disturbs an op here disturbs it in training, too (docs/0012)."""
COLD_BYTES = 32 << 20
"""Before each run so many other bytes are touched, as in a graph, where an op finds its inputs in memory."""

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Measured:
    """Of one op: its mean seconds, None where it refused made-up values; and what it takes of host memory while it runs
    (``scratch``), which of a GPU's is not known."""

    seconds: float | None
    scratch_bytes: int


_measured: dict[Signature, Measured] = {}


def time_ops(gm: GraphModule, device: torch.device) -> None:
    """Note on the compute nodes of ``gm`` their seconds on ``device``, and their scratch; ``annotate`` must have run."""
    alike: dict[Signature, list[Node]] = {}
    for node in (n for n in gm.graph.nodes if _is_timed(n, device)):
        alike.setdefault((str(device), torch.get_num_threads(), *signature_of(node)), []).append(node)
    with _as_in_training(), torch.no_grad(), torch.random.fork_rng(devices=_cuda(device)):
        _measured.update(_in_rounds({s: nodes for s, nodes in alike.items() if s not in _measured}, device))
    for signature, nodes in alike.items():
        for node in nodes:
            measured = _measured[signature]
            noted = dataclasses.replace(
                meta.cost(node), measured_s=measured.seconds, scratch_bytes=measured.scratch_bytes
            )
            meta.set_cost(node, noted)


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Without what tracing has switched on: its modes, and the dispatcher in Python, which takes 30 microseconds of each op and
    keeps the interpreter while a kernel runs."""
    with _disable_current_modes(), no_python_dispatcher():
        yield


def _in_rounds(alike: dict[Signature, list[Node]], device: torch.device) -> dict[Signature, Measured]:
    """What each op takes: the mean seconds of a few runs of all, and then of as many more as the graph's sum depends on."""
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)

    def runs_s(run: Callable[[], object], runs: int) -> list[float]:
        found: list[float] = []
        while len(found) < runs and not (found and found[-1] > LONG_S):
            cold.fill_(len(found) % 2)
            found.append(timed(run, device))
        return found

    def first_runs(node: Node) -> tuple[int, list[float]]:
        run = _runner(node, device)
        return _warm_up(run, node, device), runs_s(run, FIRST_RUNS)

    found: dict[Signature, list[float]] = {}
    scratch_bytes: dict[Signature, int] = {}
    run_s: dict[Signature, float] = {}  # with what comes before each
    for signature, nodes in alike.items():
        began_s = time.perf_counter()
        with suppress(Exception):  # whatever its kernel, or one of a package of the user's, raises for such values
            scratch_bytes[signature], found[signature] = first_runs(nodes[0])
            run_s[signature] = (time.perf_counter() - began_s) / (1 + FIRST_RUNS)
    adds_s = {signature: len(alike[signature]) * statistics.fmean(seconds) for signature, seconds in found.items()}
    total_s = sum(adds_s.values())
    again = [signature for signature in found if adds_s[signature] > NEGLIGIBLE * total_s]
    affordable = int(WORTH_STEPS * total_s / max(1e-9, (ROUNDS - 1) * sum(run_s[signature] for signature in again)))
    most = max(1, min(MOST_RUNS, affordable))
    for _ in range(ROUNDS - 1):
        for signature in again:
            if found[signature][-1] <= LONG_S:
                runs = round(ROUND_S * len(alike[signature]) / total_s)
                found[signature] += runs_s(_runner(alike[signature][0], device), min(max(runs, 1), most))
    return {
        signature: Measured(_mean_s(found[signature]) if signature in found else None, scratch_bytes.get(signature, 0))
        for signature in alike
    }


def _warm_up(run: Callable[[], object], node: Node, device: torch.device) -> int:
    """The very first run of an op, whose seconds do not count; the scratch that it took, where that may matter."""
    if not _is_watched(node, device):
        timed(run, device)
        return 0
    began_s = time.perf_counter()
    taken = scratch.watched(run)
    if time.perf_counter() - began_s < LONG_S:
        timed(run, device)  # what it needs of the heap was given back
    return taken and scratch.as_copy(taken, map(meta.value, (node, *node.all_input_nodes)))


def _is_watched(node: Node, device: torch.device) -> bool:
    return device.type == "cpu" and meta.cost(node).touched_bytes >= scratch.LOOKED_AT_BYTES


def forget() -> None:
    """Measure anew from here on."""
    _measured.clear()


def _is_timed(node: Node, device: torch.device) -> bool:
    """On a GPU views take nothing: the thread that makes them is ahead of it."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    found = meta.cost(node)
    if found.runs_unread and not found.is_random:
        return False
    if device.type == "cuda" and _reads_its_seed(node):
        return False
    return found.lane is Lane.COMPUTE and not (found.is_view and device.type == "cuda")


def _reads_its_seed(node: Node) -> bool:
    """Whether it is the backward of a fused attention with dropout, whose kernel reads the seed on the host, wherever a tensor
    made for it lies: no exception, the process ends."""
    name = str(node.target)
    if "scaled_dot_product" not in name or "backward" not in name:
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    place = next((place for place, arg in enumerate(schema) if arg.name == "dropout_p"), None)
    given = node.args[place] if place is not None and place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def signature_of(node: Node) -> Signature:
    """What decides how long ``node`` takes: its op, and shape, stride and dtype of what it reads."""
    args, kwargs = _mapped(node, lambda source: _described(meta.value(source)))
    return (str(node.target), repr(args), repr(kwargs))


def _mapped(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """The arguments of ``node`` with ``value_of`` each node among them."""
    return map_arg((node.args, node.kwargs), value_of)


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        sizes = tuple(at_hint(size) for size in value.shape)
        return (str(value.dtype), sizes, tuple(at_hint(step) for step in value.stride()))
    if isinstance(value, tuple | list):
        return tuple(_described(item) for item in value)
    return at_hint(value) if isinstance(value, torch.SymInt) else value


def _runner(node: Node, device: torch.device) -> Callable[[], object]:
    """``node``'s op on tensors made for it."""
    made: dict[Node, object] = {}
    is_read = not meta.cost(node).is_view

    def real(source: Node) -> Any:
        if source not in made:
            made[source] = _real(meta.value(source), device, filled=is_read)
        return made[source]

    args, kwargs = _mapped(node, real)
    args, kwargs = _numbers(args), _numbers(kwargs)
    op: Any = node.target
    # As graphs do: else what is timed of a large value is the kernel clearing its pages.
    if meta.cost(node).bytes >= LEAST_BYTES and is_assignable(node):
        op, args, kwargs = into(op, args, kwargs, _real(meta.value(node), device))
    return lambda: op(*args, **kwargs)


def _real(value: object, device: torch.device, *, filled: bool = True) -> object:
    """A tensor like the traced one; its values do not matter, but denormal or foreign ones might slow kernels down."""
    if isinstance(value, torch.Tensor):
        sizes = [at_hint(size) for size in value.shape]
        strides = [at_hint(step) for step in value.stride()]
        where = value.device if value.device.type == "cpu" else device
        made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=where)
        return made.fill_(0.5 if value.dtype.is_floating_point else 0) if filled else made
    if isinstance(value, tuple | list):
        return tuple(_real(item, device, filled=filled) for item in value)
    return value


def _numbers(args: Any) -> Any:
    """``args`` with symbolic sizes at their hints."""
    if isinstance(args, torch.SymInt):
        return at_hint(args)
    if isinstance(args, tuple | list):
        return type(args)(_numbers(item) for item in args)
    if isinstance(args, dict):
        return {key: _numbers(item) for key, item in args.items()}
    return args


def _mean_s(seconds: list[float]) -> float:
    most_s = HICCUP * statistics.median(seconds)
    return statistics.fmean(min(each, most_s) for each in seconds)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``run()``, its work on the device included; what it made dies outside the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    made = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    end_s = time.perf_counter()
    del made
    return end_s - start_s


def _cuda(device: torch.device) -> Iterable[int]:
    return [device.index or 0] if device.type == "cuda" else []
