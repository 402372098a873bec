"""AdamW and Adam whose states live in the runtime of a compiled model.

They are ``torch.optim.Optimizer`` subclasses: param groups, schedulers, ``state_dict`` and ``zero_grad`` are torch's.
What differs is when the arithmetic runs: inside the backward, as each gradient arrives. ``step`` is the barrier.
The arithmetic is torch's own: with the same ``fused`` the bits are those of ``torch.optim.AdamW`` on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lohan_fx.errors import StepError
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.engine import Engine
from lohan_fx.shell import Shell

_HYPER = ("lr", "betas", "eps", "weight_decay", "maximize", "fused")


class Adam(torch.optim.Optimizer):
    """Adam over the parameters of one compiled model, updated inside the backward.

    Args:
        params: ``model.parameters()`` or param groups, as in torch; all of one model compiled by ``lohan_fx.compile``.
        fused: use torch's fused CPU kernel (faster; its bits are those of ``torch.optim.Adam(fused=True)``). None is
            torch's default on the CPU: not fused.
        accumulation_steps: backwards per step. None learns it from the first step, whose gradients are therefore held
            until ``step``; every later step overlaps.

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
        if amsgrad:
            raise ValueError("amsgrad=True is not supported: it needs a third state per parameter; use amsgrad=False")
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(f"accumulation_steps is {accumulation_steps}: expected at least 1, or None to learn it")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "fused": fused, "amsgrad": False,
        }  # fmt: skip
        self._engine: Engine | None = None
        self._group_of: dict[int, int] = {}
        self._used: dict[int, AdamOptions] = {}
        super().__init__(params, defaults)
        assert self._engine is not None
        if self._engine.options is not None:
            raise ValueError("this model has an optimizer already: use that one, or compile the model again")
        self._engine.options = self._options
        self._engine.micro_batches.expected = accumulation_steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks that the parameters are of one compiled model and the hyper-parameters in range."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_hyper(group)
        for parameter in group["params"]:
            if not isinstance(parameter, Shell) or parameter.owner is None:
                raise TypeError(
                    f"{type(self).__name__} was given a parameter of shape {tuple(parameter.shape)} that is not of a "
                    "compiled model: create the optimizer after lohan_fx.compile(model, hw), from model.parameters()"
                )
            engine: Engine = parameter.owner.engine  # type: ignore[attr-defined]
            if self._engine is not None and engine is not self._engine:
                raise ValueError(
                    f"{parameter.parameter_name} is of another compiled model than the parameters before it: "
                    "create one optimizer per model"
                )
            self._engine = engine
            self._group_of[parameter.slot] = len(self.param_groups) - 1

    def _options(self, slot: int) -> AdamOptions:
        """What the runtime asks when the gradient of ``slot`` arrives: the hyper-parameters as they are now."""
        if slot not in self._group_of:
            name = self._engine.slots[slot].name if self._engine else slot
            raise StepError(f"{name} got a gradient but is in no param group: pass it, or set requires_grad_(False)")
        options = self._current(self.param_groups[self._group_of[slot]])
        self._used[self._group_of[slot]] = options
        return options

    def _current(self, group: dict[str, Any]) -> AdamOptions:
        return AdamOptions(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self._decoupled,
            maximize=bool(group["maximize"]),
            fused=bool(group["fused"]),
        )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The barrier: returns once every update of this step is in place.

        Raises ``StepError`` where a hyper-parameter changed after updates with the old one had run, and whatever
        failed on a lane.
        """
        if closure is not None:
            raise ValueError(
                "step(closure) would evaluate the loss again after parameters were updated inside the backward: "
                "call loss.backward() and then step()"
            )
        assert self._engine is not None
        for index, used in self._used.items():
            if used != self._current(self.param_groups[index]):
                raise StepError(
                    f"param group {index} changed between backward and step ({used} was used, now "
                    f"{self._current(self.param_groups[index])}): the update ran inside the backward; change "
                    "hyper-parameters after step()"
                )
        self._engine.step(self._group_of.__contains__)
        self._used.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that are held. After ``step`` there are none. Raises ``StepError`` if applied already."""
        del set_to_none
        assert self._engine is not None
        self._engine.zero_grad()

    # --- state_dict: torch's own format, so that it can be exchanged with torch.optim.AdamW -------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's: all moments are read into memory (8 bytes per parameter)."""
        assert self._engine is not None
        self._engine.settle()
        shells = {shell.slot: shell for group in self.param_groups for shell in group["params"]}
        for slot, shell in shells.items():
            updates = self._engine.residency[slot].updates
            if updates:
                exp_avg, exp_avg_sq = self._engine.states.read_moments(slot)
                self.state[shell] = {
                    "step": torch.tensor(float(updates)), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq
                }  # fmt: skip
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's: writes steps and moments to the store. Parameters without an entry get zero moments."""
        assert self._engine is not None
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        super().load_state_dict({**state_dict, "state": {}})
        shells = [shell for group in self.param_groups for shell in group["params"]]
        self._engine.restored()
        for index, shell in zip(saved, shells, strict=True):
            entry = state_dict["state"].get(index)
            resident = self._engine.residency[shell.slot]
            if entry is not None:
                self._engine.states.write_moments(shell.slot, entry["exp_avg"], entry["exp_avg_sq"])
                resident.updates = int(entry["step"])
            elif resident.updates:
                zeros = torch.zeros(shell.shape)
                self._engine.states.write_moments(shell.slot, zeros, zeros)
                resident.updates = 0


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


def _check_hyper(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
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
