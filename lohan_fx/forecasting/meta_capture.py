"""meta_capture: the joint graph of a model that was never materialised.

The model is on ``meta`` (or anywhere: its values are not read). Its parameters become shells without a store, its
buffers zeros, and Dynamo and AOTAutograd trace it exactly as ``compile`` would, on the CPU, whatever machine the plan
is for; attention with dropout is a GPU's where it is for one (``gpu_attention``). Of equal blocks only the first few
are traced; ``unroll_blocks`` instantiates the others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from lohan_fx.capture import FLAT, captured, parameters_of, prepare_dynamo, refuse_regions, shells_among
from lohan_fx.errors import CaptureError
from lohan_fx.forecasting.equal_blocks import EqualBlocks, equal_blocks, truncated
from lohan_fx.forecasting.gpu_attention import with_gpu_attention
from lohan_fx.parameters.shell import capturing, make_shell
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import ParameterInput
from lohan_fx.passes.own_gradients import own_gradients
from lohan_fx.passes.unroll_blocks import LEAST_BLOCKS, BlocksDiffer, unroll_blocks
from lohan_fx.planning.problem import ParameterFacts


@dataclass(frozen=True)
class MetaCapture:
    """What planning needs of a model at one input shape.

    ``joint``: the annotated joint graph, whose first ``num_outputs`` outputs are the forward's. ``parameters``: its
    placeholders. ``facts``: all parameters of the model in slot order. ``traced_nodes``: how many nodes tracing made,
    against ``len(joint.graph.nodes)`` with the instantiated ones. ``notes``: what the user should know.
    """

    joint: GraphModule
    num_outputs: int
    parameters: dict[str, ParameterInput]
    facts: tuple[ParameterFacts, ...]
    traced_nodes: int
    notes: tuple[str, ...]


class _Taken(Exception):
    """Raised in place of partitioning: the joint graph is there, and nothing is to be compiled."""

    def __init__(self, joint: GraphModule, num_outputs: int, parameters: dict[str, ParameterInput]) -> None:
        super().__init__("the joint graph was taken")
        self.joint, self.num_outputs, self.parameters = joint, num_outputs, parameters


def meta_capture(
    model: nn.Module, inputs: Mapping[str, Any], *, compute_dtype: torch.dtype, device: str = "cpu", unroll: bool = True
) -> MetaCapture:
    """Trace ``model`` for training with ``inputs`` on a ``device`` ("cpu" or "cuda"). It is used up: it loses its parameters, and
    most of its blocks.

    Raises ``CaptureError`` where the model cannot be captured as one graph.
    """
    facts = _facts(model, compute_dtype)
    slots = {fact.name: slot for slot, fact in enumerate(facts)}
    blocks, note = equal_blocks(model) if unroll else (None, "every block was traced, as asked")
    _replace_parameters(model, compute_dtype, slots)
    trace = functools.partial(_trace, model, inputs, device)
    if blocks is not None and len(blocks.blocks) > LEAST_BLOCKS:
        try:
            return _unrolled(trace, facts, slots, blocks)
        except BlocksDiffer as error:
            note = f"every block was traced: {error}"
    taken = trace()
    annotate(taken.joint)
    own_gradients(taken.joint, taken.num_outputs)
    notes = (note,) if note and unroll else ()
    return MetaCapture(taken.joint, taken.num_outputs, taken.parameters, facts, len(taken.joint.graph.nodes), notes)


def first_line(error: Exception) -> str:
    """What went wrong; of what Dynamo says around it, only what the model's own operation said."""
    said = re.search(r"got (\w+\(.*)", str(error))
    lines = [said.group(1)] if said else str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def _unrolled(
    trace: Callable[[], _Taken],
    facts: tuple[ParameterFacts, ...],
    slots: Mapping[str, int],
    blocks: EqualBlocks,
) -> MetaCapture:
    count = len(blocks.blocks)
    try:
        with truncated(blocks, LEAST_BLOCKS):
            taken = trace()
    except Exception as error:
        # The model may need all its blocks. What else is wrong with it is raised when they are traced.
        raise BlocksDiffer(f"the first {LEAST_BLOCKS} alone fail: {first_line(error)}") from error
    annotate(taken.joint)
    own_gradients(taken.joint, taken.num_outputs)
    joint, names = unroll_blocks(
        taken.joint, prefix=blocks.path, count=count, num_outputs=taken.num_outputs, parameters=taken.parameters
    )
    parameters = {
        placeholder: ParameterInput(slots[name], name, facts[slots[name]].trainable)
        for placeholder, name in names.items()
    }
    return MetaCapture(joint, taken.num_outputs, parameters, facts, len(taken.joint.graph.nodes), ())


def _facts(model: nn.Module, compute_dtype: torch.dtype) -> tuple[ParameterFacts, ...]:
    return tuple(
        ParameterFacts(name, p.numel(), p.numel() * compute_dtype.itemsize, p.requires_grad)
        for name, p in model.named_parameters()
    )


# --- tracing --------------------------------------------------------------------------------------------------


def _trace(model: nn.Module, inputs: Mapping[str, Any], device: str) -> _Taken:
    prepare_dynamo()
    _materialise_buffers(model)

    def call(**keywords: Any) -> Any:
        return model(**keywords)

    # Dynamo keeps what it learns with the code object: with one of its own, that goes when the call does.
    call.__code__ = call.__code__.replace()
    compiled = torch.compile(call, backend=functools.partial(_take, device=device), fullgraph=True, dynamic=False)
    try:
        with torch._dynamo.config.patch(FLAT), capturing(), torch.enable_grad():
            captured(model, functools.partial(compiled, **{name: _on_cpu(value) for name, value in inputs.items()}))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, _Taken):
            return error.inner_exception
        raise
    finally:
        reset_code(call.__code__)
    raise CaptureError(
        "the model has nothing to train: its forward returned without a graph that autograd could go back through"
    )


def _take(gm: GraphModule, example_inputs: list[Any], *, device: str) -> Any:
    """A ``torch.compile`` backend that stops where the joint graph is known."""
    refuse_regions(gm)
    if device == "cuda":
        with_gpu_attention(gm)
    found = shells_among(example_inputs)

    def take(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        raise _Taken(joint, num_fwd_outputs, parameters_of(joint, found))

    def nothing(graph: GraphModule, _: Any) -> Any:
        raise CaptureError("the model has nothing to train: no output of its forward depends on a trainable parameter")

    return aot_autograd(fw_compiler=nothing, bw_compiler=nothing, inference_compiler=nothing, partition_fn=take)(
        gm, example_inputs
    )


def _replace_parameters(model: nn.Module, compute_dtype: torch.dtype, slots: Mapping[str, int]) -> None:
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                full = f"{prefix}.{name}" if prefix else name
                shell = make_shell(parameter, dtype=compute_dtype, device=torch.device("cpu"))
                shell.slot, shell.parameter_name = slots[full], full
                made[id(parameter)] = made[id(shell)] = shell
            module._parameters[name] = made[id(parameter)]


def _materialise_buffers(model: nn.Module) -> None:
    """Zeros for tensors on ``meta`` that are no parameters; tracing asks for their shapes, not their values."""
    on_cpu = functools.lru_cache(maxsize=None)(_on_cpu)  # a buffer that two modules share stays one
    for module in model.modules():
        for held in (module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    held[name] = on_cpu(value)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype)
    return value
