"""compiled_model: what ``compile`` leaves with a model: its shells, its runtime, its plans."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lohan_fx import process_memory
from lohan_fx.capture import FLAT, Replan, backend_for, captured, prepare_dynamo
from lohan_fx.captured_graphs import CapturedGraphs
from lohan_fx.errors import CaptureError, InfeasiblePlan, OffloadedParameterError
from lohan_fx.garbage import collected_soon
from lohan_fx.module_calls import Call, Key, ModuleCalls
from lohan_fx.optim import refuse_foreign_step
from lohan_fx.parameters.held_gradient import HeldGradient
from lohan_fx.parameters.module_methods import ModuleMethods
from lohan_fx.parameters.original_parameters import Original
from lohan_fx.parameters.reached import Sources, reached
from lohan_fx.parameters.shell import Shell, captures, capturing, make_shell
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.symbolic_sizes import is_symbolic
from lohan_fx.passes.touched_values import brought_bytes
from lohan_fx.plan import Plan, Prediction
from lohan_fx.planning.budgets import captured_bytes
from lohan_fx.planning.correction import correction
from lohan_fx.planning.self_check import SelfCheck, may_be_beaten, typical, worth_revising
from lohan_fx.planning.waiting_forwards import WaitingForwards
from lohan_fx.process_memory import ProcessMemory
from lohan_fx.reporting.memory_report import BETWEEN, TOLERATED_HOLE_BYTES, MemoryAccounts
from lohan_fx.request import Request, settled
from lohan_fx.returned_tensors import ReturnedTensors
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.interrupts import interrupt_waits
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S
from lohan_fx.runtime.resident_limit import STEP_BYTES, ResidentLimit, Rises
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.workspace import Workspace

_LOG = logging.getLogger(__name__)

ATTRIBUTE = "_lohan_fx"
RECOMPILE_LIMIT = 64
EXIT_TIMEOUT_S = 1.5
"""How long the end of a process, or Ctrl-C, waits for the lanes, and then for the store."""
_MAPPED_AT_LIMIT_BYTES = STEP_BYTES // 2
"""Two smaller values that touch holes which nobody counted pass the limit by less than the promise is beyond it."""
_UNFORESEEN_BYTES = 32 << 20
"""By so much more than was foreseen the process may grow between two looks, in the heap (docs/0055)."""
living: list[CompiledModel] = []
"""All that this process has compiled and not released: the end of the process closes them, and no variable need lead there."""


@contextmanager
def _capturing() -> Iterator[None]:
    """What our captures are made with; without guards on hooks, a module's first one would not run where it is registered after
    the model was captured."""
    settings = {"recompile_limit": RECOMPILE_LIMIT, "skip_nnmodule_hook_guards": False, **FLAT}
    with torch._dynamo.config.patch(settings), capturing():
        yield


def _refuse_saving_hooks() -> None:
    """Hooks on what autograd saves get our shells and handles, as plain tensors without memory: reading one ends the process.
    Those of ``torch.utils.checkpoint`` read none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") != torch.utils.checkpoint.__name__:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise OffloadedParameterError(
            f"the model was called within torch.autograd.graph.saved_tensors_hooks ({name}), as save_on_cpu and TRL's "
            "activation_offloading do, which would read parameters that are not in memory: leave them out, since the plan "
            "decides which activations leave the device"
        )


class Prepared(Exception):
    """Raised in place of the first forward by ``prepare``: the graphs are linked, nothing has run. ``plan``: that of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class CompiledModel:
    """Owns the runtime of one model; kept on the model as ``model._lohan_fx``."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        request: Request,
        originals: Mapping[int, Original],
        cleanup: Callable[[], None],
        *,
        before: ProcessMemory,
    ) -> None:
        self.model = model
        self.engine = engine
        self.rss_before_bytes = before.rss_bytes
        self._graphs = CapturedGraphs()
        self._request = request
        self._originals = originals
        self._cleanup = cleanup
        self.checks = SelfCheck(engine.timeline)
        self._replan: Replan | None = None
        self._revised = False
        self._corrected: tuple[Plan, Prediction] | None = None
        self._trained_by: Plan | None = None
        self._preparing = False
        self._unconfigured: list[Callable[[], None]] = []
        self._untidy_calls = self._idle_code = 0
        self._calls = ModuleCalls(self._backend_for, request.dynamic)
        self._waiting = WaitingForwards()
        self._returned = ReturnedTensors()
        self._warned = self._warned_of_outputs = False
        self._learns_forwards = request.plan is None
        self._forwards_before = request.forwards
        # The model's own parameters were there before ``compile``, and are gone.
        self._promise_bytes = max(0, before.rss_bytes - self.original_bytes) + request.budgets.host_memory_bytes
        # It asks again only after so much more, which must not pass the promise either.
        engine.resident_limit = ResidentLimit(
            self._promise_bytes - STEP_BYTES - _UNFORESEEN_BYTES,
            self._give_back_at_limit,
            engine.growth_bytes,
            engine.coming_bytes,
            self._promise_bytes,
            engine.free_bytes,
            self._let_go_of_code,
        )
        self.memory = MemoryAccounts(engine.memory_use, before, self.original_bytes)
        self._restore: list[Callable[[], None]] = []
        self._maps_large_values = False

    @property
    def plans(self) -> list[Plan]:
        return self._graphs.plans

    @property
    def halves(self) -> list[Halves]:
        """The graphs of ``plans``."""
        return self._graphs.halves

    @property
    def original_bytes(self) -> int:
        """What the parameters took before ``compile``."""
        return sum(original.bytes for original in self._originals.values())

    # --- taking over the model --------------------------------------------------------------------------------

    def attach(self) -> None:
        """Replace the model's parameters by shells and its call by the compiled one."""
        prepare_dynamo()
        # All are made before the first takes its place: whatever fails, the model is as it was.
        shells = {slot: self._shell(slot) for slot in self._originals}
        if self.engine.device.type == "cuda":
            self._move_buffers()
        for slot, original in self._originals.items():
            for module, name in original.places:
                module._parameters[name] = shells[slot]
        methods = ModuleMethods(self.engine, self._request.compute_dtype)
        self._restore.append(methods.undo)
        methods.replace(self.model, {module for original in self._originals.values() for module, _ in original.places})
        self._restore.append(register_optimizer_step_pre_hook(refuse_foreign_step).remove)
        self.engine.on_stage = self.checks.begins
        self._at_exit()
        for module in self.model.modules():
            if any(isinstance(parameter, Shell) for parameter in module.parameters()):
                self._take_call(module)
        object.__setattr__(self.model, ATTRIBUTE, self)

    def _move_buffers(self) -> None:
        """To the GPU, all or none."""
        try:
            for buffer in self.model.buffers():
                self._restore.append(functools.partial(_move, buffer, buffer.device))
                _move(buffer, self.engine.device)
        except BaseException:
            self._undo()
            raise

    def _shell(self, slot: int) -> Shell:
        module, name = self._originals[slot].places[0]
        parameter = self.engine.slots[slot]
        held = module._parameters[name]
        assert held is not None, f"{parameter.name} vanished while it was being stored"
        shell = make_shell(held, dtype=parameter.compute_dtype, device=self.engine.device)
        shell.slot, shell.parameter_name, shell.owner = slot, parameter.name, self
        return shell

    def _take_call(self, module: nn.Module) -> None:
        """The model, or a part of it that somebody calls by itself: an encoder before ``generate``, what an adapter has wrapped.
        Each is captured in graphs of its own."""
        run = torch._dynamo.disable(functools.partial(self._run, module))

        def call(*args: Any, **kwargs: Any) -> Any:
            if captures():
                return module._call_impl(*args, **kwargs)  # in the graph of what contains it
            return run(*args, **kwargs)

        before = module.__dict__.get("_compiled_call_impl")
        module._compiled_call_impl = call
        self._restore.append(functools.partial(setattr, module, "_compiled_call_impl", before))

    def _backend_for(self, module: nn.Module) -> Callable[..., Any]:
        names = {part: name for name, part in self.model.named_modules()}
        return backend_for(self, names.get(module, type(module).__name__))  # it may have left the model since

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_saving_hooks()
        with self.engine.one_call(), _capturing():
            self._before_call()
            key = module, torch.is_grad_enabled()
            if key not in self._calls:
                self.capture_begins()  # of the first; Dynamo's own part of it comes before the backend is asked
            return self._called(key, args, kwargs)

    def _before_call(self) -> None:
        """What the calls so far have told: memory goes back, and plans change."""
        if self._untidy_calls:
            # ``prepare`` is one call, and AOTAutograd lets go of its records as the first backward comes.
            self._untidy_calls -= 1
            self._tidy_up()
            self._expect_peak()
        if torch.is_grad_enabled():
            if self._replan is not None and self.checks.has_learned:
                self._correct()
            if self._lacks_room():
                self._leave_room()

    def _called(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The outputs of a call, captured where its shape is new. Where that fails, again: with room for fewer forwards, traced
        for one shape at a time, or with the graphs for other shapes gone, whichever was in its way."""
        call, why, graphs = self._calls[key], "", 0
        _, training = key
        while True:
            try:
                returned = captured(self.model, functools.partial(call, *args, **kwargs))
            except Prepared:
                self._has_captured(key, call, why, graphs)
                raise
            except InfeasiblePlan as error:
                if self._did_before(error):
                    continue
                if not (training and self._shapes_may_go()):
                    raise
            except (CaptureError, TorchDynamoException) as error:
                if why or not self._calls.was_for_many(key, error):
                    raise
                call, why, graphs = self._calls.for_each_shape(key), str(error), len(self.plans)
                continue
            else:
                self._has_captured(key, call, why, graphs)
                if training and self._request.loss_only:
                    self._returned.returned(returned)
                return returned
            # Not before here: the error leads to all of the graph that has got no plan.
            self._let_shapes_go()
            graphs = len(self.plans)

    def _shapes_may_go(self) -> bool:
        """Whether there are graphs for other shapes, and none of them has a backward to run."""
        waits = self.engine.micro_batches.backwards or self._waiting.of(self.engine.updates.finished)
        return bool(self.training_graphs()) and not waits

    def _let_shapes_go(self) -> None:
        """There is no room for one more shape's graphs: those for others go, and are captured again where they come again."""
        warnings.warn(
            f"host_memory has no room for the graphs of one more input shape beside {len(self.training_graphs())} others: these "
            "go, and are captured again where their shapes come again; pad batches to fewer sizes, or promise more host_memory",
            stacklevel=7,
        )
        self._replan = None
        self._forget_training()

    def _has_captured(self, key: Key, call: Call, why: str, graphs: int) -> None:
        """``call`` was captured for ``key``. ``why``: why it is for one shape at a time, which it is from now on; then there were
        so many ``graphs`` before it, for several."""
        if not self._calls.settle(key, call):
            return
        module, training = key
        warnings.warn(
            f"{type(module).__name__} cannot be traced for inputs of several sizes at once, so each shape gets graphs and a plan "
            f"of its own (compile(dynamic=False) says so beforehand): {why}",
            stacklevel=7,
        )
        if training:
            self._forget_training(before=graphs, but=call)

    def _tidy_up(self) -> None:
        """Capture, and before it the model's own parameters, leave holes in the heap as large as a small promise."""
        with interrupt_waits():
            gc.collect()
        process_memory.return_free_memory()

    def _expect_peak(self) -> None:
        """What exceeds the expected peak by more than a few holes are holes, which are given back although more is promised."""
        if self.engine.device.type == "cpu" and self.halves:
            most_bytes = self.memory.expected_peak_bytes(max(self.added_bytes()), TOLERATED_HOLE_BYTES)
            self.engine.resident_limit.expect(most_bytes)

    def added_bytes(self) -> list[int]:
        """What each of ``halves`` adds to the process's memory (``expected_peak``)."""
        return self._graphs.added_bytes(self._request, self.engine.store.drives)

    def _give_back(self) -> None:
        self.engine.return_free_memory()
        process_memory.return_free_memory()

    def _give_back_at_limit(self) -> None:
        """From here on large values make no new holes in the heap: each may lie in another one, which no look foresees."""
        if not self._maps_large_values:
            self._maps_large_values = True
            self._restore.append(functools.partial(process_memory.map_from, process_memory.USUALLY_MAPPED_BYTES))
        process_memory.map_from(_MAPPED_AT_LIMIT_BYTES)
        self._give_back()

    def _let_go_of_code(self) -> bool:
        """Before the promise is passed: of libraries' code what imports and captures have run, and steps do not. Whether that was
        done: what steps run comes back at once, so more than a few times would be in vain."""
        if not self._idle_code:
            return False
        self._idle_code -= 1
        process_memory.return_library_pages()
        return True

    def _at_exit(self) -> None:
        """A process that ends without ``release`` still removes its files; a forked child leaves its parent's alone."""
        close = functools.partial(self._close, EXIT_TIMEOUT_S)
        atexit.register(close)
        self._restore.append(functools.partial(atexit.unregister, close))
        living.append(self)
        self._restore.append(functools.partial(living.remove, self))

    # --- what the backend asks for ----------------------------------------------------------------------------

    @property
    def workspace(self) -> Workspace:
        return self.engine.workspace

    @property
    def room(self) -> Room:
        return self.engine.room

    def capture_begins(self) -> None:
        """What a capture takes comes on top of what is in RAM: first give back what nobody uses; where little is promised, also
        what imports have run."""
        self.workspace.give_back()
        self._give_back()
        capture_bytes = captured_bytes(len(self._request.parameters)) + _UNFORESEEN_BYTES
        if process_memory.rss_bytes() + capture_bytes > self._promise_bytes:
            process_memory.return_library_pages()

    def replaced_among(self, values: Sequence[object]) -> list[str]:
        """The names of those parameters whose places shells have taken and that are among ``values``."""
        alive = {
            id(original.parameter()): slot
            for slot, original in self._originals.items()
            if original.parameter() is not None
        }
        return [self.engine.slots[alive[id(value)]].name for value in values if id(value) in alive]

    def request(self, before: int | None = None) -> Request:
        """What ``compile`` was asked for, less what other graphs take, for one more graph; with ``before``, less what those take
        that came before ``halves[before]``, for that one. The homes that the last plan gave to the parameters, whether
        gradients are held by now, and whether states may still be cut otherwise."""
        homes = self.plans[-1].parameters if self.plans else ()
        sizes = self._request.chooses_sizes and not self.engine.states.cut
        budgets = self._request.budgets
        fixed_bytes = budgets.fixed_bytes + self._graphs.others_bytes(self._request, before)
        return dataclasses.replace(
            self._request,
            homes=homes,
            least_homes=self._graphs.least_homes(),
            most_at_home_bytes=self._graphs.most_at_home_bytes(self._request),
            holds=self.engine.updates.holds,
            chooses_sizes=sizes,
            budgets=dataclasses.replace(budgets, fixed_bytes=fixed_bytes),
        )

    def link(
        self, halves: Halves, plan: Plan, *, swap_sizes: Sequence[int], slots: range, replan: Replan | None
    ) -> None:
        """Rewritten graphs are there. The runtime gets ready for them before the first one runs, not now: tracing is
        under way, and every tensor made here would be a fake one."""
        self._unconfigured.append(
            functools.partial(
                self.engine.configure,
                plan,
                swap_sizes_bytes=swap_sizes,
                activation_slots=slots,
                brought_bytes=brought_bytes(halves, plan) if plan.device == "cpu" else 0,
                trains=halves.backward is not None,
            )
        )
        if replan is not None:
            self._forwards_before = self._request.forwards
            # Corrected from the steps of one graph and shape alone: with several, none of them explains the measurements.
            alone = not self.training_graphs() and not self._revised and not is_symbolic(halves.forward)
            wanted = self._request.revise and self._request.plan is None and self._request.hw.is_this_machine()
            # What is measured of compute beside a GPU is how long its launches took.
            timed = plan.device == "cpu"
            self._replan = replan if alone and wanted and timed else None
            self.checks.forget()
        # The first plan fixes the staging buffers of the runtime; later ones have to count on these.
        self._request = settled(self._request, plan.windows) if self._request.chooses_staging else self._request
        self.engine.states.chunk_elements = plan.windows.chunk_elements
        self._graphs.add(halves, plan)
        self._untidy_calls = self._idle_code = 2

    def main_graph(self) -> int | None:
        """Which of ``halves`` stands for the model where none is named (``CapturedGraphs.main``)."""
        return self._graphs.main()

    def training_graphs(self) -> list[int]:
        """Which of ``halves`` train."""
        return self._graphs.training()

    def training_graph(self) -> int | None:
        """The one of ``training_graphs`` whose forward ran last, or where none of them has run, that was captured last."""
        graphs = self.training_graphs()
        ran = (index for index in graphs if self.plans[index] is self._trained_by)
        return next(ran, graphs[-1] if graphs else None)

    def _correct(self) -> None:
        """The first steps are over: correct the profile by them, and revise the plan if that pays (``self_check``)."""
        replan, self._replan = self._replan, None
        (graph,) = self.training_graphs()
        found = self.plans[graph].prediction
        assert replan is not None and found is not None
        learned = correction(self.halves[graph], self.plans[graph], self._request, typical(self.checks.steps))
        self._request = dataclasses.replace(learned.request, holds=self.engine.updates.holds)
        self._corrected = self.plans[graph], learned.prediction
        if not may_be_beaten(found.step_s, learned.ratios, learned.step_s):
            return
        with collected_soon():
            then = replan(self._request).prediction
        assert then is not None
        if not worth_revising(learned.step_s, then.step_s):
            return
        _LOG.info(
            "the plan is revised: %.3g s a step instead of %.3g s, by what was measured", then.step_s, learned.step_s
        )
        self._revised = True
        self._forget_training()

    def _forget_training(self, before: int | None = None, but: Call | None = None) -> None:
        """What trains is captured and planned anew: all of it, or what there was ``before`` there were so many, ``but`` one."""
        most_bytes = self._graphs.captured_bytes(self._request)
        self._graphs.forget_training(before)
        self._calls.forget(training=True, but=but)
        self._tidy_up()
        self._graphs.have_left(self.memory.left_bytes(), most_bytes)

    def _lacks_room(self) -> bool:
        """Whether more forwards waited for their backwards than plans count, and none of this step does yet."""
        more = self._learns_forwards and self._waiting.wanted > self._request.forwards
        return more and not self.engine.micro_batches.backwards and not self._waiting.of(self.engine.updates.finished)

    def _leave_room(self) -> None:
        """New plans have room for so many."""
        self._forwards_before = self._request.forwards
        self._request = dataclasses.replace(self._request, forwards=self._waiting.wanted)
        self._replan = None
        self._forget_training()

    def _did_before(self, why: InfeasiblePlan) -> bool:
        """There is no plan with room for the forwards that were seen: go on with as many as before, if it was they."""
        if self._forwards_before == self._request.forwards:
            return False
        warnings.warn(
            f"no plan has room for the {self._request.forwards} forwards that wait for their backwards at once, so plans go on "
            f"counting {self._forwards_before}, and memory may pass the promise: {why}",
            stacklevel=7,
        )
        self._request = dataclasses.replace(self._request, forwards=self._forwards_before)
        self._learns_forwards = False
        return True

    def waits(self, plan: Plan, kept: torch.Tensor) -> None:
        """A training forward by ``plan`` has run; it keeps ``kept`` among others."""
        self._waiting.waits(plan, kept, self.engine.updates.finished)

    def _backward_begins(self, plan: Plan) -> None:
        step = self.engine.updates.finished
        self._warn_if_outputs_are_held()
        over = self._waiting.backward_begins(plan, step)
        if over and not self._warned:
            self._warned = True
            then = "the plan that was given has no room for them"
            if self._learns_forwards:
                then = "the next step gets new plans, with room for more (compile(forwards=...) says so beforehand)"
            warnings.warn(
                f"{max(2, len(self._waiting.of(step)))} forwards wait for their backwards at once, and what they keep together "
                f"may pass host_memory or device_memory by {over:,} bytes in this step; {then}",
                stacklevel=2,
            )

    def _warn_if_outputs_are_held(self) -> None:
        """Of what ``compile`` was told the loop would not keep."""
        if not self._request.loss_only or self._warned_of_outputs or not (nbytes := self._returned.held_bytes()):
            return
        self._warned_of_outputs = True
        warnings.warn(
            f"compile(loss_only=True) was told that the loop keeps nothing but the loss, and as the backward begins it holds "
            f"{nbytes:,} bytes of what the model returned, by which host_memory or device_memory may be passed: leave loss_only "
            "out, or let go of the rest (loss = model(**batch).loss)",
            stacklevel=3,
        )

    def corrected(self, plan: Plan) -> Prediction | None:
        """What ``plan`` is predicted to take at the rates that its first steps have corrected; None before, and for plans that
        were made with such rates."""
        return self._corrected[1] if self._corrected is not None and self._corrected[0] is plan else None

    @contextmanager
    def forward(self, rises: Rises, plan: Plan, *, training: bool) -> Iterator[None]:
        if self._unconfigured:
            self._tidy_up()
        while self._unconfigured:
            # What is brought home is trained later, whatever mode this call is in.
            with torch.inference_mode(False):
                self._unconfigured[0]()
            self._unconfigured.pop(0)
        if self._preparing:
            raise Prepared(plan)
        if training:
            self._trained_by = plan
        with self._in_stage("forward", rises), self.engine.forward(training=training):
            yield

    @contextmanager
    def backward(self, rises: Rises, plan: Plan, sources: Sources) -> Iterator[None]:
        with self.engine.one_call():
            self._backward_begins(plan)
            with self._in_stage("backward", rises), self.engine.backward(reached(sources)):
                yield

    @contextmanager
    def _in_stage(self, name: str, rises: Rises) -> Iterator[None]:
        self.memory.stage(name)
        self.engine.resident_limit.begin(rises)
        try:
            yield
        finally:
            self.memory.stage(BETWEEN)

    # --- what shells and users ask for ------------------------------------------------------------------------

    def read_parameter(self, slot: int) -> torch.Tensor:
        return self.engine.states.read_parameter(slot)

    def write_parameter(self, slot: int, value: torch.Tensor) -> None:
        self.engine.before_writing()
        self.engine.states.write_parameter(slot, value)
        self.engine.restored(self.engine.slots[slot].master_extent)

    def has_states(self, slot: int) -> bool:
        return self.engine.slots[slot].trainable

    def gradient(self, shell: Shell) -> HeldGradient | None:
        updates = self.engine.updates
        if not updates.waits(shell.slot):
            return None
        held = functools.partial(updates.settled_gradients, of_step=updates.step)
        return HeldGradient.of(shell, shell.slot, shell.parameter_name, held)

    def drop_gradient(self, slot: int) -> None:
        with self.engine.one_call():
            self.engine.updates.drop_one(slot)

    def drops_gradients(self, slot: int) -> bool:
        """Whether there is an optimizer, and it was not given this parameter."""
        options = self.engine.updates.options
        return options is not None and options(slot) is None

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Capture, plan and link for these inputs without running anything; the plan."""
        with self.engine.one_call():
            self._preparing = True
            try:
                self._run(self.model, *args, **kwargs)
            except Prepared as ready:
                return ready.plan
            finally:
                self._preparing = False
        raise CaptureError(f"a call of this {type(self.model).__name__} with these inputs ran nothing that is captured")

    def release(self) -> None:
        """Give the model ordinary parameters again, where they were, and remove the files. Idempotent."""
        if getattr(self.model, ATTRIBUTE, None) is self:
            with self.engine.one_call():
                self._release()

    def _release(self) -> None:
        self.engine.let_go()
        if self.engine.micro_batches.torn:
            warnings.warn(
                "the last step failed half-way: some of the parameters that the model gets back were updated by it and "
                "some were not",
                stacklevel=4,
            )
        # All are read before any is replaced, so that a failing drive leaves the model as it is.
        states = self.engine.states
        with states.many():
            values = {slot: states.read_parameter(slot).to(o.dtype) for slot, o in self._originals.items()}
        for slot, places in self._shells_now().items():
            value = values.pop(slot).to(self._originals[slot].device)
            parameter = nn.Parameter(value, requires_grad=any(shell.requires_grad for _, _, shell in places))
            for module, name, shell in places:
                module._parameters[name] = parameter
                shell.owner = None
        self.detach()

    def _shells_now(self) -> dict[int, list[tuple[nn.Module, str, Shell]]]:
        """Where each slot's shells are by now: their users may have replaced or tied them since."""
        found: dict[int, list[tuple[nn.Module, str, Shell]]] = {}
        homes = (module for original in self._originals.values() for module, _ in original.places)
        for module in dict.fromkeys((*self.model.modules(), *homes)):
            for name, shell in module._parameters.items():
                if isinstance(shell, Shell) and shell.owner is self:
                    found.setdefault(shell.slot, []).append((module, name, shell))
        return found

    def abandon(self) -> None:
        """As ``release``, at once: the model gets no parameters back. For a model that is released already: nothing."""
        if getattr(self.model, ATTRIBUTE, None) is self:
            for places in self._shells_now().values():
                for _, _, shell in places:
                    shell.owner = None
            self.detach(EXIT_TIMEOUT_S)

    def detach(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Take everything of ours off the model and end the runtime."""
        self._undo()
        object.__delattr__(self.model, ATTRIBUTE)
        # Dynamo's graphs lead to us and we to them, by way of its globals, where no collector would free them.
        self._calls.forget()
        self._close(timeout_s)

    def _undo(self) -> None:
        for restore in self._restore:
            restore()
        self._restore.clear()

    def _close(self, timeout_s: float) -> None:
        if self.engine.inherited:
            return  # threads and files are the parent's
        self.memory.stop()
        try:
            self.engine.close(timeout_s=timeout_s)
        finally:
            self._cleanup()


def _move(buffer: torch.Tensor, device: torch.device) -> None:
    buffer.data = buffer.data.to(device)
