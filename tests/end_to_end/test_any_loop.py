"""Training loops that nobody wrote: what a loop may do between two steps, in any order, beside plain PyTorch doing the same,
and in bfloat16 beside a model that stays in memory.

What a move gives (losses, outputs, gradients, norms) and the random numbers it draws are the same, bit for bit; weights, moments
and buffers are wherever a loop looks, and at its end: looking waits for updates, which should run beside other moves, too.
What is refused must have a reason (an update of this step has run, or its gradients were changed) and change nothing.
``LOHAN_LOOPS=200 pytest tests/end_to_end/test_any_loop.py`` tries that many.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.nn import functional as F

import lohan_fx
from benchmarks.forced_holding import leave_no_memory_to_hold
from lohan_fx.compile import compiled
from lohan_fx.errors import StepError
from lohan_fx.parameters.shell import Shell
from lohan_fx.planning import holding, problem
from tests.end_to_end.recipes import cpu_profile
from tests.exhaustive import number_of_examples

LOOPS = int(os.environ.get("LOHAN_LOOPS", number_of_examples(9)))
MOVES = 14
WORDS, WIDTH, TOKENS = 40, 16, 6
MATRIX_ELEMENTS = 256

POLICIES = ("lohan", "lohan-ds", "keep", "swap-nvme", "recompute", "in-memory", "zero-infinity", "fuyou")
HEADS = (("words",), ("side",), ("words", "side"), ("hidden",))

Outputs = dict[str, torch.Tensor]


class Anything(nn.Module):
    """An embedding, which may be tied to the head, dropout, a norm, which may have running statistics, and two heads."""

    def __init__(self, *, tied: bool, running: bool, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(TOKENS) if running else nn.LayerNorm(3 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.words, self.side = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, 4)
        if tied:
            self.words.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> Outputs:
        x = self.embed(ids)
        x = x + noise.to(x.dtype)
        hidden = x + self.down(self.dropout(F.gelu(self.norm(self.up(x)))))
        return {"words": self.words(hidden), "side": self.side(hidden.mean(1)), "hidden": hidden}


def inputs(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (``rows``, ``TOKENS``) and noise of the same tokens."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (rows, TOKENS), generator=random), torch.randn(rows, TOKENS, WIDTH, generator=random)


def loss_of(outputs: Outputs, heads: tuple[str, ...]) -> torch.Tensor:
    return sum((outputs[head].square().mean() for head in heads), torch.zeros(()))


class AnyLoop(RuleBasedStateMachine):
    """``ours`` is compiled, ``plain`` is not; each with its optimizer and scheduler."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="lohan-any-loop-"))
        self.small, problem.SMALL_PARAMETER_ELEMENTS = problem.SMALL_PARAMETER_ELEMENTS, MATRIX_ELEMENTS
        self.chosen = holding._some_updated_twice
        self.ours: Any = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        model=st.fixed_dictionaries(
            {"tied": st.booleans(), "running": st.booleans(), "dropout": st.sampled_from([0.0, 0.3])}
        ),
        frozen=st.sampled_from(["", "", "embed", "down", "side"]),
        holds=st.booleans(),
        accumulation=st.sampled_from([None, None, 1, 2]),
        checkpoints=st.sampled_from([0, 1, 2]),
        hyper=st.fixed_dictionaries({"fused": st.booleans(), "maximize": st.booleans()}),
        groups=st.booleans(),
        on_nvme=st.booleans(),
        twice=st.sampled_from([None, 0.5, 1.0]),
    )
    def begin(
        self, policy: str, model: dict[str, Any], frozen: str, holds: bool, accumulation: int | None, checkpoints: int,
        hyper: dict[str, Any], groups: bool, on_nvme: bool, twice: float | None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        if twice is not None:
            holding._some_updated_twice = lambda _, __, plan: holding.updated_twice(plan, twice)
        self.options: dict[str, Any] = {
            "policy": policy, "hold_gradients": holds, "checkpoints": checkpoints, "host_memory": "2GiB",
            "compute_dtype": self.dtype, "nvme": self.directory / "ours",
        }  # fmt: skip
        self.accumulation, self.hyper, self.groups, self.on_nvme = accumulation, hyper, groups, on_nvme
        model["running"] &= self.dtype == torch.float32  # else refused: statistics stay in fp32
        self.fresh = Anything(**model).train()
        if frozen:
            getattr(self.fresh, frozen).requires_grad_(False)
        self.plain = copy.deepcopy(self.fresh)
        self.adam, self.schedule = self._train_plain()
        self.options["nvme"].mkdir()
        self._compile()
        self._begin_step()
        self.saved: dict[str, Any] | None = None

    def _train_plain(self) -> tuple[Any, Any]:
        return self._trained_by(torch.optim.AdamW, self.plain)

    def _trained_by(self, kind: Any, model: nn.Module, **more: Any) -> tuple[Any, Any]:
        parameters = list(model.parameters())
        split = [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2], "lr": 3e-3}]
        optimizer = kind(split if self.groups else parameters, lr=1e-2, weight_decay=0.1, **self.hyper, **more)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def _compile(self, **more: Any) -> None:
        self.ours = lohan_fx.compile(copy.deepcopy(self.fresh), cpu_profile(), **self.options, **more)
        if self.on_nvme:
            leave_no_memory_to_hold(self.ours)
        accumulation = {"accumulation_steps": self.accumulation}
        self.our_adam, self.our_schedule = self._trained_by(lohan_fx.AdamW, self.ours, **accumulation)

    def teardown(self) -> None:
        try:
            if self.ours is not None:
                self._look()
                lohan_fx.release(self.ours)
        finally:
            problem.SMALL_PARAMETER_ELEMENTS, holding._some_updated_twice = self.small, self.chosen
            shutil.rmtree(self.directory)
            torch._dynamo.reset()

    def _both(self, does: Callable[[Any, Any], Any]) -> tuple[Any, Any] | None:
        """What ``does(model, optimizer)`` returns for each, having drawn the same random numbers; None where ours refuses,
        having drawn none: an update of this step has run, or its gradients have been changed."""
        before, applied = torch.get_rng_state(), self._applied()
        try:
            found = does(self.ours, self.our_adam)
        except StepError:
            assert applied or self.changed
            assert torch.equal(before, torch.get_rng_state())
            return None
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        wanted = does(self.plain, self.adam)
        assert torch.equal(after, torch.get_rng_state()), "other random numbers were drawn"
        return found, wanted

    def _applied(self) -> bool:
        return compiled(self.ours).engine.micro_batches.applied

    # --- forward and backward --------------------------------------------------------------------------------

    def _forward(self, seed: int, rows: int, heads: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        losses = self._both(lambda model, _: loss_of(model(*inputs(seed, rows)), heads))
        assert losses is None or losses[0].item() == losses[1].item()
        return losses

    def _backward(self, losses: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if losses is not None and losses[1].requires_grad:
            self.backwards += self._both(lambda model, _: losses[model is self.plain].backward()) is not None

    @rule(seed=st.integers(0, 9), rows=st.sampled_from([3, 3, 5]), heads=st.sampled_from(HEADS))
    def backward(self, seed: int, rows: int, heads: tuple[str, ...]) -> None:
        self._backward(self._forward(seed, rows, heads))

    @rule(seed=st.integers(0, 9), heads=st.sampled_from(HEADS))
    def step(self, seed: int, heads: tuple[str, ...]) -> None:
        """The usual one, so that loops get somewhere."""
        self.backward(seed, 3, heads)
        self.finish()

    @rule(
        seed=st.integers(0, 9),
        rows=st.sampled_from([3, 5]),
        head=st.sampled_from(["words", "side"]),
        frees=st.booleans(),
    )
    def backward_through_parts(self, seed: int, rows: int, head: str, frees: bool) -> None:
        """One loss of several graphs. The two gradients of an embedding tied to the head come one after the other, while eager
        adds them to each other first and then to what earlier backwards left: ``frees`` keeps the embedding's out."""
        frees = frees or self.ours.words.weight is self.ours.embed.weight

        def does(model: Any, _: Any) -> torch.Tensor:
            ids, noise = inputs(seed, rows)
            x = model.embed(ids) + noise.to(model.embed.weight.dtype)
            x = x.detach() if frees else x
            hidden = x + model.down(F.gelu(model.norm(model.up(x))))
            return getattr(model, head)(hidden).square().mean()

        losses = self._both(does)
        assert losses is None or losses[0].item() == losses[1].item()
        self._backward(losses)

    @precondition(lambda self: len(self.open) < 2)
    @rule(seed=st.integers(0, 9), heads=st.sampled_from(HEADS))
    def forward_for_later(self, seed: int, heads: tuple[str, ...]) -> None:
        if losses := self._forward(seed, 3, heads):
            self.open.append(losses)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1))
    def backward_of_earlier(self, which: int) -> None:
        self._backward(self.open.pop(which % len(self.open)))

    @precondition(lambda self: self.open)
    @rule()
    def forget_forwards(self) -> None:
        self.open.clear()

    @rule(seed=st.integers(0, 9), heads=st.sampled_from(HEADS))
    def gradient_of_an_input(self, seed: int, heads: tuple[str, ...]) -> None:
        """``torch.autograd.grad``, which updates nothing."""

        def does(model: Any, _: Any) -> torch.Tensor:
            ids, noise = inputs(seed, 3)
            noise.requires_grad_()
            return torch.autograd.grad(loss_of(model(ids, noise), heads), noise)[0]

        if gradients := self._both(does):
            assert torch.equal(*gradients)

    @rule(seed=st.integers(0, 9), rows=st.sampled_from([3, 5]), training=st.booleans())
    def evaluate(self, seed: int, rows: int, training: bool) -> None:
        def does(model: Any, _: Any) -> Outputs:
            model.train(training)
            try:
                with torch.no_grad():
                    outputs: Outputs = model(*inputs(seed, rows))
            finally:
                model.train()
            return outputs

        if outputs := self._both(does):
            assert all(torch.equal(outputs[0][name], value) for name, value in outputs[1].items())

    # --- between backward and step ---------------------------------------------------------------------------

    @rule()
    def finish(self) -> None:
        def does(_: Any, optimizer: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()

        assert self._both(does)
        self._begin_step()

    def _begin_step(self) -> None:
        self.open: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self.backwards, self.changed, self.clipped = 0, False, False

    @precondition(lambda self: not self.backwards)
    @rule(seed=st.integers(0, 9), overflows=st.booleans(), clips=st.booleans())
    def scaled_step(self, seed: int, overflows: bool, clips: bool) -> None:
        """One whose gradients overflow is skipped."""
        # Where updates run in the backward, weights are NaN before the scaler looks.
        overflows = overflows and compiled(self.ours).engine.updates.holds
        scale = 2.0**126 if overflows else 8.0
        scalers = {
            self.plain: torch.amp.GradScaler("cpu", init_scale=scale),
            self.ours: lohan_fx.GradScaler("cpu", init_scale=scale),
        }

        def backward(model: Any, _: Any) -> None:
            loss = loss_of(model(*inputs(seed, 3)), ("words",))
            scalers[model].scale(loss * (1e30 if overflows else 1.0)).backward()

        def finish(model: Any, optimizer: Any) -> float:
            scaler = scalers[model]
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return float(scaler.get_scale())

        if self._both(backward):
            self.backwards += 1
            if scales := self._both(finish):
                assert scales[0] == scales[1]
                self._begin_step()

    @precondition(lambda self: not self.backwards)
    @rule(seed=st.integers(0, 9), heads=st.sampled_from(HEADS), backwards=st.integers(1, 2), clips=st.booleans())
    def step_with_a_closure(self, seed: int, heads: tuple[str, ...], backwards: int, clips: bool) -> None:
        """The loop of Lightning, which clips within it; ``zero_grad`` comes after the first forward."""
        if not compiled(self.ours).engine.updates.holds:  # the first backward updates
            backwards, clips = 1, False

        def does(model: Any, optimizer: Any) -> float:
            def closure() -> torch.Tensor:
                for part in range(backwards):
                    loss = loss_of(model(*inputs(seed + part, 3)), heads)
                    if not part:
                        optimizer.zero_grad()
                    if loss.requires_grad:
                        loss.backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            loss: torch.Tensor = optimizer.step(closure)
            optimizer.zero_grad()
            return loss.item()

        losses = self._both(does)
        if losses is not None:
            assert losses[0] == losses[1]
            self._begin_step()

    @rule()
    def finish_and_anneal(self) -> None:
        if self.backwards:
            self.finish()
            self.our_schedule.step()
            self.schedule.step()

    @rule()
    def drop(self) -> None:
        """Forwards stay open."""
        if self._both(lambda _, optimizer: optimizer.zero_grad()):
            self._forget_gradients()

    @precondition(lambda self: self.backwards and not self.clipped)
    @rule(norm=st.sampled_from([1e-3, 0.1, 10.0]), torchs=st.booleans())
    def clip(self, norm: float, torchs: bool) -> None:
        """Once: of gradients that were multiplied by what is no power of two, the last bit of the norm may differ."""
        clips = torch.nn.utils.clip_grad_norm_ if torchs else lohan_fx.clip_grad_norm_
        if norms := self._both(lambda model, _: clips(model.parameters(), norm)):
            assert torch.equal(*norms)
            self.changed = self.clipped = True

    @precondition(lambda self: self.backwards)
    @rule(of=st.sampled_from(["embed", "up", "norm", "down", "side"]))
    def read_a_gradient(self, of: str) -> None:
        name = f"{of}.weight"

        def does(model: Any, _: Any) -> torch.Tensor | None:
            parameter = model.get_parameter(name)
            return lohan_fx.grad(model, name) if isinstance(parameter, Shell) else parameter.grad

        if self.plain.get_parameter(name).requires_grad and (gradients := self._both(does)):
            ours, plain = gradients
            assert (ours is None) == (plain is None)
            assert ours is None or torch.equal(ours, plain)

    @precondition(lambda self: self.backwards and not self._applied())
    @rule(of=st.sampled_from(["up", "norm", "side"]), factor=st.sampled_from([None, 0.5]))
    def change_a_gradient(self, of: str, factor: float | None) -> None:
        def does(model: Any, _: Any) -> None:
            parameter = model.get_parameter(f"{of}.weight")
            if factor is None or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad *= factor

        self._both(does)
        self.changed = True

    # --- between steps ---------------------------------------------------------------------------------------

    @precondition(lambda self: not self.backwards)
    @rule(lr=st.sampled_from([1e-3, 2e-2]))
    def change_the_learning_rate(self, lr: float) -> None:
        for optimizer in (self.our_adam, self.adam):
            optimizer.param_groups[-1]["lr"] = lr

    @precondition(lambda self: not self.backwards)
    @rule(of=st.sampled_from(["up", "side", "norm"]))
    def freeze_or_thaw(self, of: str) -> None:
        if all(p.requires_grad for p in getattr(self.fresh, of).parameters()):
            for model in (self.ours, self.plain):
                module = getattr(model, of)
                module.requires_grad_(not module.weight.requires_grad)

    @precondition(lambda self: not self.backwards)
    @rule()
    def look(self) -> None:
        self._look()

    def _look(self) -> None:
        if self._applied():
            self.finish()
        wanted = self.plain.state_dict()
        found = self.ours.state_dict()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        states, ours = self.adam.state_dict(), self.our_adam.state_dict()
        # Where a first step is skipped, torch's fused kernel leaves zeros.
        stepped = {index: state for index, state in states["state"].items() if state["step"]}
        assert ours["state"].keys() == stepped.keys()
        for index, state in stepped.items():
            assert all(torch.equal(ours["state"][index][name], value) for name, value in state.items()), index
        for group, other in zip(ours["param_groups"], states["param_groups"], strict=True):
            assert all(group[name] == other[name] for name in ("lr", "weight_decay", "betas", "params"))

    @precondition(lambda self: not self.backwards and not self.open)
    @rule(scale=st.sampled_from([1.0, 0.9]), optimizer=st.booleans())
    def load(self, scale: float, optimizer: bool) -> None:
        weights = {name: v * scale if v.is_floating_point() else v for name, v in self.plain.state_dict().items()}
        states = copy.deepcopy(self.adam.state_dict())

        def does(model: Any, adam: Any) -> None:
            model.load_state_dict(weights)
            if optimizer:
                adam.load_state_dict(copy.deepcopy(states))

        self._both(does)

    @precondition(lambda self: not self.backwards and not self.open)
    @rule()
    def checkpoint(self) -> None:
        keep = None if self.options["checkpoints"] else 1
        lohan_fx.checkpoint(self.ours, self.our_adam, scheduler=self.our_schedule, extra={"saved": True}, keep=keep)
        parts = self.plain, self.adam, self.schedule
        self.saved = {
            "states": copy.deepcopy([part.state_dict() for part in parts]),
            "random": torch.get_rng_state(),
            "trainable": [p.requires_grad for p in self.plain.parameters()],
        }

    @precondition(lambda self: self.saved is not None)
    @rule()
    def resume(self) -> None:
        """What was done since the checkpoint is lost; a new model takes it up."""
        assert self.saved is not None
        lohan_fx.release(self.ours)
        torch._dynamo.reset()
        torch.rand(7)
        self._compile(resume_from_checkpoint=True)
        resumed = lohan_fx.resume(self.ours, self.our_adam, scheduler=self.our_schedule)
        assert resumed is not None and resumed.extra == {"saved": True}
        assert torch.equal(torch.get_rng_state(), self.saved["random"])
        self.adam.zero_grad()
        for part, state in zip(
            (self.plain, self.adam, self.schedule), copy.deepcopy(self.saved["states"]), strict=True
        ):
            part.load_state_dict(state)
        for ours, plain, trainable in zip(
            self.ours.parameters(), self.plain.parameters(), self.saved["trainable"], strict=True
        ):
            ours.requires_grad_(trainable)
            plain.requires_grad_(trainable)
        self._begin_step()


class AnyLoopInBfloat16(AnyLoop):
    """``plain`` is compiled, too, with all that it has in memory and each gradient held until the step."""

    dtype = torch.bfloat16

    def _train_plain(self) -> tuple[Any, Any]:
        directory = self.directory / "plain"
        directory.mkdir()
        lohan_fx.compile(
            self.plain, cpu_profile(), nvme=directory, policy="in-memory", hold_gradients=True, compute_dtype=self.dtype,
            host_memory="2GiB",
        )  # fmt: skip
        return self._trained_by(lohan_fx.AdamW, self.plain)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self.ours is not None:
                lohan_fx.release(self.plain)


TestAnyLoop = AnyLoop.TestCase
TestAnyLoopInBfloat16 = AnyLoopInBfloat16.TestCase
TestAnyLoop.settings = TestAnyLoopInBfloat16.settings = hypothesis.settings(
    max_examples=LOOPS, stateful_step_count=MOVES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
