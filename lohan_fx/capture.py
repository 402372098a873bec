"""capture: the ``torch.compile`` backend: Dynamo graph in, rewritten graphs linked to the runtime out."""

from __future__ import annotations

import functools
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from lohan_fx import ops, process_memory
from lohan_fx.buffered import linked
from lohan_fx.decompositions import DECOMPOSITIONS
from lohan_fx.errors import CaptureError, LohanError
from lohan_fx.garbage import collected_soon
from lohan_fx.parameters.reached import Sources, noting_undefined, sources_of
from lohan_fx.parameters.shell import Shell
from lohan_fx.passes.annotate import is_view
from lohan_fx.passes.assign_buffers import shared_bytes
from lohan_fx.passes.cut_segments import Run, replace_segments
from lohan_fx.passes.halves import Assignment, Halves, ParameterInput, outputs_of
from lohan_fx.passes.symbolic_sizes import hold_up_to_traced
from lohan_fx.passes.touched_values import brought_rises, heap_rises, outliving_bytes, outliving_rises
from lohan_fx.passes.traffic import swap_sizes_bytes
from lohan_fx.pipeline import compile_inference, compile_training, replan
from lohan_fx.plan import Plan
from lohan_fx.planning.waiting_forwards import kept_output
from lohan_fx.request import Request
from lohan_fx.runtime.resident_limit import Rise, Rises
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.workspace import Workspace

Result = TypeVar("Result")

After = Callable[[Sequence[Any]], None]
Replan = Callable[[Request], Plan]
"""The plan that another request would get for the graph that was linked."""

_INLINES = "inline_invoke_subgraph"
FLAT: dict[str, bool] = {_INLINES: True} if hasattr(torch._dynamo.config, _INLINES) else {}
"""Dynamo's setting by which ``torch.compiler.nested_compile_region`` becomes part of the graph around it: plans know no
graphs in graphs. PyTorch 2.11 has none."""


class Linked(Protocol):
    """What the backend needs of the compiled model: its request, and a runtime to link graphs to."""

    @property
    def workspace(self) -> Workspace: ...
    @property
    def room(self) -> Room: ...
    def capture_begins(self) -> None: ...
    def replaced_among(self, values: Sequence[object]) -> list[str]: ...
    def request(self) -> Request: ...
    def link(
        self, halves: Halves, plan: Plan, *, swap_sizes: Sequence[int], slots: range, replan: Replan | None
    ) -> None: ...
    def forward(self, rises: Rises, plan: Plan, *, training: bool) -> AbstractContextManager[None]: ...
    def waits(self, plan: Plan, kept: torch.Tensor) -> None: ...
    def backward(self, rises: Rises, plan: Plan, sources: Sources) -> AbstractContextManager[None]: ...


def backend_for(model: Linked, module: str) -> Callable[[GraphModule, list[torch.Tensor]], Any]:
    """A ``torch.compile`` backend for calls of ``module``, by its name in ``model``, which it does not keep alive: Dynamo keeps
    every backend for good."""
    reference = weakref.ref(model)

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        model = reference()
        assert model is not None, "a model that is gone was called"
        model.capture_begins()
        _refuse_replaced_parameters(model, example_inputs)
        refuse_regions(gm)
        with collected_soon():
            return _Capture(model, module, shells_among(example_inputs)).compile(gm, example_inputs)

    return backend


class _Capture:
    """One Dynamo graph on its way through AOTAutograd, and what one of our answers to that leaves for the next.

    Of a graph that trains AOTAutograd asks for the two halves of the joint graph (``_partition``), then for what runs the forward
    and the backward; of another for what runs it (``_inference``).
    """

    def __init__(self, model: Linked, module: str, shells: dict[int, ParameterInput]) -> None:
        self._model = model
        self._module = module
        self._shells = shells
        self._plan: Plan | None = None
        self._kept: int | None = None
        self._sources: dict[int, Collection[int]] = {}
        self._rises: dict[str, Rises] = {}
        self._segments: dict[str, dict[str, Run]] = {}
        self._assigned: dict[str, Assignment] = {}
        self._backward: Callable[[list[Any]], Any] | None = None

    def compile(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=lambda *_: self._backward,
            inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=DECOMPOSITIONS,
        )(gm, example_inputs)
        return noting_undefined(graph, self._sources)

    def _partition(
        self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        model = self._model
        hold_up_to_traced(joint)
        parameters = parameters_of(joint, self._shells)
        halves, plan = compile_training(
            joint,
            model.request(),
            num_outputs=num_fwd_outputs,
            parameters=parameters,
            activation_slots=ops.new_slots,
        )
        again = functools.partial(replan, joint, num_fwd_outputs, parameters)
        self._link(halves, plan, again)
        self._plan = plan
        self._kept = kept_output(halves, plan)
        self._sources.update(sources_of(halves))
        model.room.reserve(outliving_bytes(halves, plan) + (plan.forwards - 1) * plan.kept_bytes)
        backward = halves.backward
        assert backward is not None
        # AOTAutograd would lower a copy of it as the first backward comes, beside all that its forward has kept.
        rises, sources = self._rises["backward"], self._sources
        self._backward = self._runs(backward, "backward", lambda: model.backward(rises, plan, sources))
        setattr(backward, "__deepcopy__", lambda _: backward)  # noqa: B010  of this one, which has no such attribute
        return halves.forward, backward

    def _forward(self, graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        _let_backward_run_again()
        model, plan, kept, rises = self._model, self._plan, self._kept, self._rises["forward"]
        assert plan is not None, "AOTAutograd asks for the halves first"

        def waits(outputs: Sequence[Any]) -> None:
            if kept is not None:
                model.waits(plan, outputs[kept])

        return self._runs(graph, "forward", lambda: model.forward(rises, plan, training=True), waits)

    def _inference(self, graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        model = self._model
        halves, plan = compile_inference(graph, model.request(), parameters=parameters_of(graph, self._shells))
        self._link(halves, plan, None)
        rises = self._rises["forward"]
        return self._runs(halves.forward, "forward", lambda: model.forward(rises, plan, training=False))

    def _link(self, halves: Halves, plan: Plan, again: Replan | None) -> None:
        halves.module = self._module
        swap_sizes = swap_sizes_bytes(halves) if halves.backward is not None else ()
        self._model.link(halves, plan, swap_sizes=swap_sizes, slots=halves.activation_slots, replan=again)
        self._segments.update(halves.compiled)
        self._assigned.update(halves.assigned)
        self._rises.update(_host_rises(halves, plan))

    def _runs(
        self,
        graph: GraphModule,
        half: str,
        around: Callable[[], AbstractContextManager[None]],
        after: After | None = None,
    ) -> Callable[[list[Any]], Any]:
        """What runs ``graph``: its segments compiled, its values in their places, inside the runtime's guard ``around``."""
        graph = replace_segments(graph, self._segments.get(half, {}))
        shared = shared_bytes(self._assigned)
        function = linked(graph, self._assigned.get(half), self._model.workspace, shared, self._model.room)
        # What compiling its code took.
        process_memory.return_free_memory()
        return _guarded(function, around, after)


def _let_backward_run_again() -> None:
    """Of what the forward keeps our backwards write over nothing, but AOTAutograd refuses ``retain_graph=True`` to those that it
    lowers as they first run, which are those for many sizes."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _host_rises(halves: Halves, plan: Plan) -> dict[str, Rises]:
    """What each half takes of host memory from look to look (``ResidentLimit``): nothing where a GPU has what it makes."""
    if plan.device != "cpu":
        return {half: {} for half, _ in halves.graphs()}
    each = [found(halves, plan) for found in (heap_rises, brought_rises, outliving_rises)]
    return {
        half: {look: Rise(*(found[half][look] for found in each)) for look in each[0][half]}
        for half, _ in halves.graphs()
    }


def shells_among(example_inputs: Sequence[Any]) -> dict[int, ParameterInput]:
    """Place -> parameter, of those inputs of a Dynamo graph that are shells."""
    return {
        index: ParameterInput(value.slot, value.parameter_name, value.requires_grad)
        for index, value in enumerate(example_inputs)
        if isinstance(value, Shell)
    }


def parameters_of(graph: GraphModule, found: dict[int, ParameterInput]) -> dict[str, ParameterInput]:
    """Placeholder name -> parameter, by the position that AOTAutograd noted on each placeholder."""
    _refuse_what_cannot_stream(graph, found)
    _refuse_mixed_dtypes(graph)
    named: dict[str, ParameterInput] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        index = getattr(node.meta.get("desc"), "idx", None)
        if type(node.meta.get("desc")).__name__ in ("PlainAOTInput", "ParamAOTInput") and index in found:
            named[node.name] = found[index]
    if len(named) != len(found):
        raise AssertionError(f"AOTAutograd kept {len(named)} of {len(found)} parameter inputs; cannot tell which")
    _refuse_returned_views(graph, named)
    return named


def refuse_regions(gm: GraphModule) -> None:
    """Parts of a Dynamo graph, at any depth, that are graphs of their own, and not ``FLAT`` in this version of PyTorch."""
    graphs = [part.graph for part in gm.modules() if isinstance(part, GraphModule)]
    if any(graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph) for graph in graphs):
        raise CaptureError(
            "the model has parts under torch.compiler.nested_compile_region, and this version of PyTorch cannot make them parts "
            "of the graph around: use PyTorch 2.13, or take that mark away (equal layers are planned as that without it)"
        )


def _refuse_replaced_parameters(model: Linked, example_inputs: Sequence[object]) -> None:
    """A parameter as it was before ``compile``, which the model has kept beside its registered name: nothing would train it."""
    names = model.replaced_among(example_inputs)
    if names:
        raise CaptureError(
            f"the model reads {', '.join(names)} from somewhere else than its registered place (a list, a tuple, an attribute of "
            "another object), where it is still the parameter of before compile(), which would not be trained: read it by that "
            "name, or hold it in a torch.nn.ParameterList"
        )


_MATMULS: dict[Any, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
"""Op -> where the first of its two matrices stands."""
_ONE_DTYPE = (
    "torch runs that in one dtype only, and parameters come in compute_dtype. Make the model's inputs in that dtype, or, where "
    "it needs some of what it computes with in float32, choose float32 (compute_dtype=torch.float32; lohan-fx plan "
    "--compute-dtype float32)"
)


def _refuse_mixed_dtypes(graph: GraphModule) -> None:
    """A product of matrices of two dtypes, which torch traces and then does not run."""
    for node in graph.graph.nodes:
        at = _MATMULS.get(node.target)
        if at is not None:
            one, other = (factor.meta["val"].dtype for factor in node.args[at : at + 2])
            if one is not other:
                raise CaptureError(f"the model multiplies a matrix in {one} by one in {other}: {_ONE_DTYPE}")


def _refuse_what_cannot_stream(graph: GraphModule, found: dict[int, ParameterInput]) -> None:
    """A parameter edited by the model itself, for which a shell has no place, and a sparse gradient."""
    output = graph.graph.output_node()
    for value, desc in zip(outputs_of(graph), output.meta.get("desc") or [], strict=False):
        about = getattr(desc, "mutated_input", getattr(desc, "grad_of", None))
        parameter = found.get(getattr(about, "idx", -1))
        if parameter is None:
            continue
        if type(desc).__name__ == "InputMutationAOTOutput":
            raise CaptureError(
                f"the model edits its parameter {parameter.name} in place while it runs, which cannot be streamed: make "
                "it a buffer, or change it between steps with model.load_state_dict"
            )
        gradient = value.meta["val"] if isinstance(value, Node) else None
        if gradient is not None and gradient.layout != torch.strided:
            raise CaptureError(
                f"the gradient of {parameter.name} is {gradient.layout}, and only dense gradients are supported: make "
                "that embedding with sparse=False"
            )


def _refuse_returned_views(graph: GraphModule, parameters: dict[str, ParameterInput]) -> None:
    """A view of a parameter among what the model returns: AOTAutograd would take it of the shell, which has no memory."""
    output = graph.graph.output_node()
    for value, desc in zip(outputs_of(graph), output.meta.get("desc") or [], strict=False):
        if type(desc).__name__ == "PlainAOTOutput" and isinstance(value, Node) and is_view(value):
            source = value
            while is_view(source):
                source = source.all_input_nodes[0]
            if source.name in parameters:
                raise CaptureError(
                    f"the model returns a view of its parameter {parameters[source.name].name}, whose values are not in memory "
                    "once the model has run: return a copy of it, made by .clone()"
                )


def _guarded(
    graph: Callable[[list[Any]], Any], around: Callable[[], AbstractContextManager[None]], after: After | None
) -> Callable[[list[Any]], Any]:
    """``graph`` inside the runtime's guard of forwards or backwards; ``after`` is told its outputs."""

    def run(args: list[Any]) -> Any:
        with around():
            outputs = graph(args)
        if after is not None:
            after(outputs)
        return outputs

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def capture_errors() -> Iterator[None]:
    """Turn Dynamo's report of a graph break, or of too many graphs, into a ``CaptureError`` that says where and why."""
    try:
        yield
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError, GuardOnDataDependentSymNode) as error:
        raise CaptureError(
            "the model cannot be captured as one graph, which lohan_fx needs to plan it: "
            f"{error}\n{_remedy(str(error))} lohan_fx.release(model) and torch._dynamo.explain(model)(inputs) find all such "
            "places"
        ) from error
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise CaptureError(
            f"the model was captured for {torch._dynamo.config.recompile_limit} kinds of inputs, and this is another. "
            "Larger inputs are planned anew: compile(dynamic=True), and prepare() the largest before others. With dynamic=False, "
            "or where the model cannot be traced for many sizes, each shape is: pad batches to one length, or to a few, and let "
            "the loader drop the last one (drop_last=True). A Python number in an attribute that the model reads may be one, "
            "too: pass numbers that change as tensors, torch.tensor(beta)"
        ) from error
    except torch._dynamo.exc.TorchRuntimeError as error:
        said = re.search(
            r"RuntimeError\(['\"](Input type .* and (?:bias|weight) type .*) should be the same", str(error)
        )
        if said is None:
            raise
        raise CaptureError(f"in a convolution of the model, {said[1]} differ: {_ONE_DTYPE}") from error
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LohanError | ValueError):
            raise error.inner_exception from None
        raise


def _remedy(report: str) -> str:
    if "utils.checkpoint" in report:
        return (
            "That is inside torch.utils.checkpoint, which is superfluous here, because plans decide what is recomputed: leave it "
            "out (model.gradient_checkpointing_disable() of Hugging Face's models), or change that code."
        )
    if "support RNN, GRU, or LSTM" in report:
        return (
            "Dynamo traces recurrent layers, step by step, with torch._dynamo.config.allow_rnn = True; on a CPU "
            "torch.backends.mkldnn.set_flags(False) must be called, too, since its kernel of LSTM cannot be traced."
        )
    if "accessing __class__ of tensor subclass" in report:
        return (
            "Compiled parameters are of a class of ours, of which Dynamo traces type(parameter) but not parameter.__class__: "
            "change that code. PEFT's DoRA trains with "
            "peft.tuners.lora.dora.dequantize_module_weight = lambda module: module.weight."
        )
    return (
        "Change that code, or compile a part of the model that has none of it (of torchvision's detectors: model.backbone), and "
        "train what is left by an optimizer of torch's."
    )


def captured(model: nn.Module, call: Callable[[], Result]) -> Result:
    """``call()``, in which Dynamo captures ``model``, with ``capture_errors``; once more with hooks that a model of Transformers
    lacked."""
    try:
        with capture_errors():
            return call()
    except CaptureError as error:
        if not (isinstance(error.__cause__, torch._dynamo.exc.Unsupported) and _install_output_hooks(model)):
            raise
    with capture_errors():
        return call()


def _install_output_hooks(model: nn.Module) -> bool:
    """Whether models of Transformers, which return hidden states, attentions or router logits by hooks, had none. They get them
    at the first call that asks, under a lock that Dynamo cannot trace."""
    try:
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:
        return False
    made = "_output_capturing_hooks_installed"
    lacking = [m for m in model.modules() if isinstance(m, PreTrainedModel) and not getattr(m, made, False)]
    for module in lacking:
        maybe_install_capturing_hooks(module)
    return bool(lacking)


def prepare_dynamo() -> None:
    """Let Dynamo trace through the one-time warnings of Hugging Face models instead of breaking the graph.

    All their loggers': each file of Transformers has its own, and one warns of ``use_cache`` under gradient checkpointing.
    """
    try:
        from transformers.utils import logging as hf_logging
    except ImportError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = hf_logging.get_logger("transformers.modeling_utils")
        for silent in (logger.warning, logging.Logger.warning_once):  # type: ignore[attr-defined]  # made by Transformers
            torch._dynamo.config.ignore_logging_functions.add(silent)
    _keep_metrics_quiet()


def _keep_metrics_quiet() -> None:
    """PyTorch 2.11 writes its settings as JSON for each graph, fails at functions among them, and prints a traceback of that."""
    utils: Any = torch._dynamo.utils
    try:
        with suppress(AttributeError):  # of a version without it
            utils._get_dynamo_config_for_logging()
    except TypeError:
        utils._get_dynamo_config_for_logging = lambda: None
