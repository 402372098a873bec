"""AdamW and Adam whose states live in the runtime of a compiled model.

They are ``torch.optim.Optimizer`` subclasses: param groups, schedulers, ``state_dict`` and ``zero_grad`` are torch's.
What differs is when the arithmetic runs: inside the backward, as each gradient arrives. ``step`` is the barrier.
The arithmetic is torch's own: with the same ``fused`` the bits are those of ``torch.optim.AdamW`` on the CPU.
"""

from __future__ import annotations

import collections
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Never, TypeVar

import torch

from lohan_fx.checkpoints.training_state import Parts, stopped_by_wear
from lohan_fx.errors import OffloadedParameterError, StepError
from lohan_fx.parameters.shell import Shell
from lohan_fx.runtime.adam import AdamOptions, Number
from lohan_fx.runtime.engine import OPTIMIZER_STATES, Engine

T = TypeVar("T")


class _Elsewhere(collections.defaultdict[torch.Tensor, Any]):
    """``optimizer.state``: nothing is in it, and what would have no effect is refused."""

    def _refuse(self, *_: object) -> Never:
        raise OffloadedParameterError(
            "the state of a parameter was looked up in optimizer.state, or changed there, and is not in memory: "
            "optimizer.state_dict() reads them, optimizer.load_state_dict() changes them (where its 'state' is {}, all begin "
            "anew)"
        )

    __missing__ = __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


def _in_one_call(method: Callable[..., T]) -> Callable[..., T]:
    """``method`` while no other thread calls, trains or steps the model."""

    @functools.wraps(method)
    def alone(self: Adam, *args: Any, **kwargs: Any) -> T:
        with self.engine.one_call():
            return method(self, *args, **kwargs)

    return alone


class Adam(torch.optim.Optimizer):
    """Adam over the parameters of one compiled model, updated inside the backward.

    Args:
        params: ``model.parameters()`` or param groups, as in torch; all of one model compiled by ``lohan_fx.compile``.
        fused: use torch's fused CPU kernel (faster; its bits are those of ``torch.optim.Adam(fused=True)``). None is
            torch's default on the CPU: not fused.
        accumulation_steps: backwards per step, as many for one loss as it calls the model. None learns it from the first
            step, whose gradients are therefore held until ``step``; every later step overlaps.

    Raises:
        TypeError: a parameter is not of a compiled model.
        ValueError: parameters of two models, parameters that the model lacks, or a bad hyper-parameter.
    """

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        accumulation_steps: int | None = None,
    ) -> None:
        is_count = isinstance(accumulation_steps, int) and not isinstance(accumulation_steps, bool)
        if accumulation_steps is not None and not (is_count and accumulation_steps >= 1):
            raise ValueError(
                f"accumulation_steps is {accumulation_steps!r}: expected a whole number, at least 1, or None to learn it"
            )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize,
            "foreach": None, "capturable": False, "differentiable": False, "fused": fused,
            "decoupled_weight_decay": self._decoupled,
        }  # fmt: skip
        self._engine: Engine | None = None
        self._shown: collections.defaultdict[torch.Tensor, Any] = _Elsewhere()
        self._owner: Any = None
        self._group_of: dict[int, int] | None = None
        self.steps_done = 0
        self.parts = Parts()
        super().__init__(params, defaults)
        if self._engine is None:
            raise ValueError(f"{type(self).__name__} got no parameters: pass model.parameters()")
        if self._engine.updates.options is not None:
            raise ValueError(
                "this model has an optimizer already: use that one, or compile the model again. Where a function that makes "
                "it is called more than once, as Lightning does configure_optimizers for each fit, let it return the same one"
            )
        self._engine.updates.options = self._options
        self._engine.micro_batches.declare(accumulation_steps)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks that the parameters are of one compiled model and the hyper-parameters in range, and that no
        gradients are missing that autograd would have kept since before they were in a group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_hyper(group)
            self._engine = self._engine_of(group["params"])
            self._refuse_unkept(group["params"])
        except Exception:
            self.param_groups.pop()
            raise
        self._group_of = None

    def _refuse_unkept(self, shells: Iterable[Shell]) -> None:
        unkept = set() if self._engine is None else self._engine.updates.unkept
        if names := [shell.parameter_name for shell in shells if shell.slot in unkept]:
            raise ValueError(
                f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} had gradients in steps before, in no param group, to "
                "which PyTorch would add the next ones, and which were not kept: call model.zero_grad() first, which "
                "optimizer.zero_grad() does not replace"
            )

    def _engine_of(self, parameters: Iterable[torch.Tensor]) -> Engine | None:
        """The runtime that all of these parameters, and those of the groups before, belong to."""
        found = self._engine
        for parameter in parameters:
            if not isinstance(parameter, Shell) or parameter.owner is None:
                raise TypeError(
                    f"{type(self).__name__} was given a parameter of shape {tuple(parameter.shape)} that is not of a "
                    "compiled model: create the optimizer after lohan_fx.compile(model, hw), from model.parameters()"
                )
            engine: Engine = parameter.owner.engine  # type: ignore[attr-defined]
            if found is not None and engine is not found:
                raise ValueError(
                    f"{parameter.parameter_name} is of another compiled model than the parameters before it: "
                    "create one optimizer per model"
                )
            found, self._owner = engine, parameter.owner
        return found

    def _options(self, slot: int) -> AdamOptions | None:
        """What the runtime asks when the gradient of ``slot`` arrives: the hyper-parameters as they are now.

        None for a parameter in no group: as in torch, its gradient changes nothing.
        """
        if self.engine.resumed is not None:
            raise StepError(
                "the model was compiled from a checkpoint, and learning rate, step and random numbers are not resumed yet: "
                "call lohan_fx.resume(model, optimizer, ...) before the first step"
            )
        group = self._groups().get(slot)
        return None if group is None else self._current(self.param_groups[group])

    def _groups(self) -> dict[int, int]:
        """Slot -> the param group that has it. Users may move parameters between groups, and take them out: it is found anew in
        each step."""
        if self._group_of is None:
            for group in self.param_groups:
                _refuse_amsgrad(group)
            groups = enumerate(self.param_groups)
            self._group_of = {shell.slot: index for index, group in groups for shell in group["params"]}
        return self._group_of

    @property
    def engine(self) -> Engine:
        """The runtime of the model whose parameters these are."""
        assert self._engine is not None
        return self._engine

    def _current(self, group: dict[str, Any]) -> AdamOptions:
        return AdamOptions(
            lr=_now(group["lr"]),
            beta1=_now(group["betas"][0]),
            beta2=_now(group["betas"][1]),
            eps=_now(group["eps"]),
            weight_decay=_now(group["weight_decay"]),
            decoupled=self._decoupled or bool(group["decoupled_weight_decay"]),
            maximize=bool(group["maximize"]),
            fused=bool(group["fused"]),
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The barrier: returns once every update of this step is in place.

        ``closure``: called first, once, as by torch's Adam: it computes the loss, calls ``backward`` and returns the loss, which
        ``step`` returns. PyTorch Lightning trains this way.

        Raises ``StepError`` where a hyper-parameter changed after updates with the old one had run, whatever failed on
        a lane, and ``WearBudgetExceeded`` where the step is done and the next one may not be (``max_bytes_written``).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._engine is not None
        self._group_of = None
        now = [self._current(group) for group in self.param_groups]
        for slot, used in self._engine.updates.applied_with.items():
            index = self._groups().get(slot)
            if index is None or used != now[index]:
                where = (
                    f"param group {index}" if index is not None else f"{self._engine.slots[slot].name}'s param group"
                )
                then = now[index] if index is not None else "it is in none"
                raise StepError(
                    f"{where} changed between backward and step ({used} was used, now {then}): the "
                    "update ran inside the backward; change hyper-parameters and groups after step()"
                )
        dropped = sorted(self._engine.updates.dropped)
        if late := [self._engine.slots[slot].name for slot in dropped if slot in self._groups()]:
            raise StepError(
                f"{', '.join(late[:3])}{', ...' if len(late) > 3 else ''} came into a param group between backward and step, and "
                "had a gradient before, which was not kept: take it out again until after step(), and add groups after step()"
            )
        updated = set(self._engine.step(self._count))
        self._group_of = None
        # As any optimizer's update does: a backward that needs the parameters as they were is refused by autograd.
        shells = [shell for group in self.param_groups for shell in group["params"] if shell.slot in updated]
        torch.autograd.graph.increment_version(shells)
        if self._engine.wear.is_spent(checkpoints=2):  # the last, and the caller may want one of his own
            assert self._owner is not None
            raise stopped_by_wear(self, self._owner.model)
        return loss

    def _count(self) -> None:
        self.steps_done += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that are held. After ``step`` there are none. Raises ``StepError`` if applied already.

        ``set_to_none=False`` is taken for True: no zeros are kept, so what a step does not use is not updated by them.
        """
        del set_to_none
        assert self._engine is not None
        self._group_of = None
        self._engine.drop_gradients()

    @property
    def state(self) -> collections.defaultdict[torch.Tensor, Any]:
        """Without entries but within ``state_dict()``: states are not in memory."""
        return self._shown

    @state.setter
    def state(self, value: collections.defaultdict[torch.Tensor, Any]) -> None:
        if self._engine is not None:  # not by torch's constructor
            _Elsewhere().update(value)

    # --- state_dict: torch's own format, so that it can be exchanged with torch.optim.AdamW -------------------

    @_in_one_call
    def state_dict(self) -> dict[str, Any]:
        """As torch's: all moments are read into memory (8 bytes per parameter)."""
        assert self._engine is not None
        self._engine.before_reading()
        shells = {shell.slot: shell for group in self.param_groups for shell in group["params"]}
        found: collections.defaultdict[torch.Tensor, Any] = collections.defaultdict(dict)
        with self._engine.states.many():
            for slot, shell in shells.items():
                updates = self._engine.residency[slot].updates
                if updates:
                    exp_avg, exp_avg_sq = self._engine.states.read_moments(slot)
                    steps = torch.tensor(float(updates), dtype=torch.float32)
                    found[shell] = {"step": steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._shown = found
        try:
            return super().state_dict()
        finally:
            self._shown = _Elsewhere()

    @_in_one_call
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's: writes steps and moments to the store. Parameters without an entry get zero moments; the entry of one that
        was frozen when the model was compiled is left out, with a warning."""
        assert self._engine is not None
        self._engine.before_writing()
        given: dict[str, Any] = {}
        left_out: list[str] = []

        def check(_: torch.optim.Optimizer, adapted: dict[str, Any]) -> dict[str, Any]:
            given.update(adapted)
            self._check_saved(given)
            return {**adapted, "state": {}}

        def write(_: torch.optim.Optimizer) -> None:
            left_out.extend(self._write_states(given))

        # Between the hooks of others, of which some adapt what is loaded, and others look at what was.
        ours = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(write, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in ours:
                hook.remove()
        if left_out:
            warnings.warn(
                f"the saved moments of {', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''} are left out: frozen when "
                "the model was compiled, these have no optimizer states",
                stacklevel=2,
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The end of loading, as of torch's AdamW and Adam: what older versions did not save gets its default."""
        super().__setstate__(state)
        self._group_of = None
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if self._decoupled:
                group["decoupled_weight_decay"] = True

    def _check_saved(self, given: Mapping[str, Any]) -> None:
        """Before anything is written: is this the state of such an optimizer?"""
        for group in given["param_groups"]:
            _check_hyper(group)
        for index, shell in self._saved_and_ours(given["param_groups"]):
            _check_entry(given["state"].get(index), shell)

    def _saved_and_ours(self, saved_groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Shell]]:
        """Each saved parameter's index with the parameter that it is now; if they differ in number, torch says so."""
        saved = [index for group in saved_groups for index in group["params"]]
        shells = [shell for group in self.param_groups for shell in group["params"]]
        return zip(saved, shells, strict=False)

    def _write_states(self, given: Mapping[str, Any]) -> list[str]:
        """Steps and moments to the store; the names of those that are left out."""
        left_out = []
        with self.engine.states.many():
            for index, shell in self._saved_and_ours(given["param_groups"]):
                entry = given["state"].get(index)
                if not self.engine.slots[shell.slot].trainable:
                    left_out += [shell.parameter_name] if entry else []
                    continue
                resident = self.engine.residency[shell.slot]
                if entry:
                    self.engine.states.write_moments(shell.slot, entry["exp_avg"], entry["exp_avg_sq"])
                    resident.updates = int(entry["step"])
                elif resident.updates:
                    zeros = torch.zeros(shell.shape)
                    self.engine.states.write_moments(shell.slot, zeros, zeros)
                    resident.updates = 0
        self.engine.restored(OPTIMIZER_STATES)
        return left_out


class AdamW(Adam):
    """Adam with decoupled weight decay; arguments as ``Adam``, ``weight_decay`` 0.01 by default as in torch."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        accumulation_steps: int | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, fused=fused, accumulation_steps=accumulation_steps,
        )  # fmt: skip


def refuse_foreign_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """A hook before every optimizer's ``step``: one of torch's own would find no gradients, and silently do nothing."""
    del args, kwargs
    if isinstance(optimizer, Adam):
        return
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if isinstance(parameter, Shell):
            raise OffloadedParameterError(
                f"{type(optimizer).__name__} of torch.optim was given {parameter.parameter_name}, which is offloaded: it "
                "cannot update it; create lohan_fx.AdamW(model.parameters(), ...) after lohan_fx.compile"
            )


def _check_entry(entry: dict[str, Any] | None, shell: Shell) -> None:
    """Before anything is written: is this the Adam state of a parameter like ``shell``?"""
    # torch leaves an empty one where somebody has looked for a state before there was any.
    if entry is None or entry == {}:
        return
    if not isinstance(entry, Mapping):
        raise ValueError(f"the saved state of {shell.parameter_name} is a {type(entry).__name__}: it is not of Adam")
    for name in ("step", "exp_avg", "exp_avg_sq"):
        if name not in entry:
            raise ValueError(
                f"the saved state of {shell.parameter_name} has no {name} but {', '.join(entry)}: it is not of Adam"
            )
    if not _is_count(entry["step"]):
        raise ValueError(
            f"the saved step of {shell.parameter_name} is {entry['step']!r}: expected how many updates it has had, a whole number"
        )
    for name in ("exp_avg", "exp_avg_sq"):
        value = entry[name]
        if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
            kind = type(value).__name__
            found = f"on {value.device}, {value.layout}" if isinstance(value, torch.Tensor) else f"a {kind}"
            raise ValueError(
                f"the saved {name} of {shell.parameter_name} is {found}: expected a dense tensor in memory"
            )
        if value.shape != shell.shape:
            raise ValueError(
                f"the saved {name} of {shell.parameter_name} has shape {tuple(value.shape)}; the parameter has "
                f"{tuple(shell.shape)}: load the state of an optimizer over the same parameters in the same order"
            )


def _is_count(value: Any) -> bool:
    """Whether it is a whole number, whatever holds it, and none below zero."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str) and number >= 0 and number.is_integer()


def _check_hyper(group: dict[str, Any]) -> None:
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise ValueError(f"a param group has no {', '.join(missing)}: it is not of Adam")
    _refuse_amsgrad(group)
    try:
        beta1, beta2 = group["betas"]
    except (TypeError, ValueError) as error:
        raise ValueError(f"betas is {group['betas']!r}: expected two numbers") from error
    given = {name: group[name] for name in ("lr", "eps", "weight_decay")} | {"betas[0]": beta1, "betas[1]": beta2}
    for name, value in given.items():
        if isinstance(value, str):  # as YAML reads 1e-8
            raise TypeError(f"{name} is {value!r}: expected a number")
    checks: Iterable[tuple[str, float, bool]] = (
        ("lr", float(group["lr"]), float(group["lr"]) >= 0.0),
        ("eps", group["eps"], group["eps"] >= 0.0),
        ("betas[0]", beta1, 0.0 <= beta1 < 1.0),
        ("betas[1]", beta2, 0.0 <= beta2 < 1.0),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0.0),
    )
    for name, value, good in checks:
        if not good:
            raise ValueError(f"{name} is {value}: expected {'[0, 1)' if name.startswith('betas') else 'zero or more'}")


def _refuse_amsgrad(group: Mapping[str, Any]) -> None:
    if group.get("amsgrad"):
        raise ValueError("amsgrad=True is not supported: it needs a third state per parameter; use amsgrad=False")


def _now(value: Any) -> Number:
    """A hyper-parameter as it is now: a tensor may be changed in place before the update has run, or after it."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else float(value)
