"""inductor: segments compiled by TorchInductor, each distinct one once, and used where that changes nothing but time.

A compiled segment rounds as often as the ops that it replaces (``emulate_precision_casts``), and holds no sums, whose
order a compiler may change. Before it is used it is run beside those ops on tensors of its own shapes (``segment_trial``),
and refused unless all bits are equal, and where it would need more memory than the plan has or takes no less time. So
losses and weights do not depend on which segments are compiled, on where a plan cuts them, or on the machine on which a
run is resumed; and what the planner counts of memory holds for both. Equal segments, of one model or of several, share
one function, and Inductor's cache on disk keeps it for the next process.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta
from lohan_fx.measuring import segment_trial
from lohan_fx.measuring.segment_trial import Trial
from lohan_fx.meta import Cost
from lohan_fx.passes.cut_segments import Key, Run, Segment, extract, segments_of
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import bytes_at, peaks
from lohan_fx.plan import Plan

_LOG = logging.getLogger(__name__)

AUTO: str = "auto"
BOXED: str = "boxed"
INDUCTOR: str = "inductor"
MODES = (AUTO, BOXED, INDUCTOR)
"""What ``compile(segments=...)`` takes: the faster by measurement, all op by op, or all compiled that can be."""
WORTH_S = 0.008
"""With "auto" a segment is compiled if its ops, and those of all segments equal to it, take so long per step: compiling
takes some 4 s and saves about half, so it pays within a thousand steps."""

COMPILER_BYTES = 128 << 20
"""What the compiler adds to a process: its modules and what it remembers of some 20 segments (110 MB, measured)."""
AUTO_MEMORY_BYTES = 16 * COMPILER_BYTES
"""With "auto" nothing is compiled under a smaller promise of host memory, of which the compiler would be a large part."""

_SETTINGS = {
    "emulate_precision_casts": True,
    "fallback_random": True,
    # A pool of worker processes would outlive the few kernels that it compiles.
    "compile_threads": 1,
}


@dataclass(frozen=True)
class Compiled:
    """What came of compiling a segment: the function, or None and why it is not used; seconds and bytes of a call."""

    run: Run | None
    seconds: float
    peak_bytes: int
    refused: str = ""


_compiled: dict[Key, Compiled] = {}
_said: set[str] = set()


def mode_for(mode: str, device: str, host_memory_bytes: int) -> str:
    """What ``mode`` comes to, before there is a graph: where "auto" will not compile, the compiler's memory is not set
    aside. Beside a GPU it does not, until somebody has measured it there."""
    if mode not in MODES:
        raise ValueError(f"segments is {mode!r}: expected one of {', '.join(map(repr, MODES))}")
    return BOXED if mode == AUTO and (device != "cpu" or host_memory_bytes < AUTO_MEMORY_BYTES) else mode


def compile_segments(halves: Halves, plan: Plan, mode: str, seconds: Callable[[Cost], float]) -> None:
    """Note on ``halves`` the compiled segments that ``mode`` wants, as far as they need no more memory than the plan has.

    The ops of those get the seconds that they take so, in shares, for the prediction.
    """
    found = {name: segments_of(gm) for name, gm in halves.graphs()}
    wanted = _wanted([segment for segments in found.values() for segment in segments], mode, seconds)
    if not wanted or not _has_compiler(next(iter(wanted.values()))):
        return
    start_s, before = time.perf_counter(), len(_compiled)
    alive, most = bytes_at(halves, plan), peaks(halves, plan)
    for name, segments in found.items():
        halves.compiled[name] = {}
        for segment in (s for s in segments if s.key in wanted):
            compiled = _compiled_once(segment, mode)
            room = most[name].bytes - max(alive[name][n.name] for n in segment.nodes)
            if compiled.run is not None and (compiled.peak_bytes <= room):
                halves.compiled[name][segment.name] = compiled.run
                _note_seconds(segment, compiled, seconds)
    _LOG.info(
        "%d segments run compiled, %d distinct ones were compiled in %.1f s",
        sum(map(len, halves.compiled.values())),
        len(_compiled) - before,
        time.perf_counter() - start_s,
    )


def _wanted(segments: list[Segment], mode: str, seconds: Callable[[Cost], float]) -> dict[Key, Segment]:
    """The distinct segments to compile."""
    total: dict[Key, float] = {}
    for segment in segments:
        total[segment.key] = total.get(segment.key, 0.0) + _op_seconds(segment, seconds)
    return {s.key: s for s in segments if mode == INDUCTOR or total[s.key] >= WORTH_S}


def _op_seconds(segment: Segment, seconds: Callable[[Cost], float]) -> float:
    return sum(seconds(meta.cost(n)) for n in segment.computing)


def _note_seconds(segment: Segment, found: Compiled, seconds: Callable[[Cost], float]) -> None:
    before_s = _op_seconds(segment, seconds)
    if any(meta.cost(n).measured_s is None for n in segment.computing):
        return
    for node in segment.computing:
        share = seconds(meta.cost(node)) / before_s
        meta.set_cost(node, dataclasses.replace(meta.cost(node), measured_s=found.seconds * share))


def copy_seconds(halves: Halves, joint: GraphModule) -> None:
    """Let the captured graph know what its ops take compiled, so that a plan made later counts with it."""
    named: dict[str, Node] = {n.name: n for n in joint.graph.nodes}
    for _, gm in halves.graphs():
        for node in gm.graph.nodes:
            original = named.get(node.name)
            if original is not None and node.op == "call_function":
                measured_s = meta.cost(node).measured_s
                meta.set_cost(original, dataclasses.replace(meta.cost(original), measured_s=measured_s))


# --- compiling one --------------------------------------------------------------------------------------------


def _compiled_once(segment: Segment, mode: str) -> Compiled:
    # Inductor's kernels for processors are made for a number of threads.
    key = (torch.get_num_threads(), *segment.key)
    if key not in _compiled:
        try:
            run, namespace = _compile(segment)
        except Exception as error:  # whatever a compiler may raise: the ops themselves are always there
            _say_once("a segment could not be compiled and runs op by op, as do others like it: %s", error)
            _compiled[key] = Compiled(None, 0.0, 0, "cannot be compiled")
        else:
            _compiled[key] = _judged(segment_trial.try_out(segment, run, namespace), run, mode)
        _LOG.debug("segment %s: %s", [str(n.target) for n in segment.computing], _compiled[key])
    return _compiled[key]


def _judged(trial: Trial, run: Run, mode: str) -> Compiled:
    refused = ""
    if not trial.is_exact:
        refused = "rounds otherwise than its ops"
    elif trial.peak_bytes is None:
        refused = "allocates where it cannot be counted"
    elif mode == AUTO and trial.seconds >= trial.ops_seconds:
        refused = f"takes {trial.seconds:.2g} s, its ops {trial.ops_seconds:.2g} s"
    return Compiled(None if refused else run, trial.seconds, trial.peak_bytes or 0, refused)


def _compile(segment: Segment) -> tuple[Run, dict[str, Any]]:
    """``segment`` as Inductor compiles it, and the names that its code sees. The modules are imported here, because runs
    of small models never need them."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import _disable_current_modes

    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one, Inductor does not use its cache
    with _disable_current_modes(), torch.no_grad(), config.patch(_SETTINGS):
        with mode:
            inputs = [segment_trial.empty_like(n) for n in segment.inputs]
            traced = make_fx(extract(segment), decomposition_table=select_decomp_table())(*inputs)
        outputs: Any = traced.graph.output_node()
        outputs.meta["user_visible_output_idxs"] = list(range(len(segment.outputs)))
        outputs.meta["original_output_strides"] = [segment_trial.empty_like(n).stride() for n in segment.outputs]
        with tracing(TracingContext(mode)):
            code: Any = compile_fx_inner(traced, inputs)
    compiled: Any = code.current_callable

    def segment_call(args: list[Any]) -> Any:
        return compiled(args)

    return segment_call, getattr(compiled, "__func__", compiled).__globals__


def _has_compiler(segment: Segment) -> bool:
    device = "cpu" if segment.is_on_cpu else "cuda"
    missing = _missing_compiler(device)
    if missing:
        _say_once(
            "no compiler for segments: %s; pointwise ops run one by one, which costs some percent of a step and changes no "
            "number",
            missing,
        )
    return not missing


def _missing_compiler(device: str) -> str:
    """What is missing to compile for ``device``; "" if nothing is."""
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler (g++ or clang++)"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else "there is no Triton"


def _say_once(message: str, *args: object) -> None:
    if message not in _said:
        _said.add(message)
        _LOG.warning(message, *args)
