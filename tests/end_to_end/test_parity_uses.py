"""Ways to use a model that are not one loss from one call: each is exact, or refused."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lohan_fx
from lohan_fx.capture import FLAT, prepare_dynamo
from lohan_fx.errors import CaptureError, OffloadedParameterError, StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from tests.end_to_end.models import GPT2_SHALLOW, LLAMA, PERCEPTRON, Case, tokens, vectors
from tests.end_to_end.recipes import LR, MasterAdamW, assert_same_weights, train, weights_of

pytestmark = pytest.mark.usefixtures("leak_check")

POLICIES = ("swap-nvme", "recompute")

Use = Callable[[nn.Module, Any], list[float]]


class Pair(nn.Module):
    """Returns no loss but two tensors, one of them an activation; calls one layer twice, one under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.gelu(self.twice(F.gelu(self.first(x))))
        hidden = checkpoint(self._again, hidden, use_reentrant=False)
        return self.last(hidden), hidden

    def _again(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.twice(hidden)))


def losses_outside(model: nn.Module, optimizer: Any, steps: int = 3, rows: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        output, hidden = model(torch.randn(rows, 24))
        loss = output.square().mean() + hidden.abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_of_inputs(model: nn.Module, optimizer: Any) -> list[float]:
    found = []
    for _ in range(3):
        x = torch.randn(4, 24, requires_grad=True)
        model(x)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        found += x.grad.flatten().tolist()
    return found


def freezing_and_thawing(model: nn.Module, optimizer: Any) -> list[float]:
    losses = losses_outside(model, optimizer, 2)
    model.twice.requires_grad_(False)
    losses += losses_outside(model, optimizer, 2)
    model.twice.requires_grad_(True)
    return losses + losses_outside(model, optimizer, 1)


@pytest.mark.parametrize("use", [losses_outside, gradients_of_inputs, freezing_and_thawing])
@pytest.mark.parametrize("policy", POLICIES)
def test_uses_are_exact(policy: str, use: Use, hw: HardwareProfile, tmp_path: Path) -> None:
    expected, model = _build(), _build()
    torch.manual_seed(1)
    wanted = use(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, policy)):
        torch.manual_seed(1)
        assert use(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


class Added(nn.Module):
    """Its parameters have one gradient, which is that of its input: ``given`` by the caller, or made in the backward."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(24, 300)), nn.Parameter(torch.randn(24, 300))
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + self.one + self.other
        return total if self.given else torch.tanh(total)


def clearing_gradients(model: nn.Module, optimizer: Any, backwards: int, cleared: threading.Event) -> list[float]:
    """After each backward the gradient of the input, and the one handed in, are cleared before anything is updated."""
    found = []
    for _ in range(3):
        for _ in range(backwards):
            cleared.clear()
            x, gradient = torch.randn(24, 300, requires_grad=True), torch.randn(24, 300)
            model(x).backward(gradient)
            assert x.grad is not None
            found.append(x.grad.sum().item())
            x.grad.zero_()
            gradient.zero_()
            cleared.set()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("hold", [False, True], ids=["applied", "held"])
@pytest.mark.parametrize("segments", ["boxed", "inductor"])
def test_a_gradient_of_others_may_be_edited_before_the_step(
    segments: str,
    hold: bool,
    backwards: int,
    given: bool,
    on_nvme: Any,
    little_is_small: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared, leave = threading.Event(), OutOfCoreOptimizer._leave_in_place

    def leave_late(*args: Any) -> None:
        assert cleared.wait(60.0)
        leave(*args)

    monkeypatch.setattr(OutOfCoreOptimizer, "_leave_in_place", leave_late)
    torch.manual_seed(0)
    model = Added(given)
    expected = copy.deepcopy(model)
    torch.manual_seed(1)
    wanted = clearing_gradients(expected, torch.optim.AdamW(expected.parameters(), lr=LR), backwards, cleared)
    with on_nvme(model, hold_gradients=hold, segments=segments):
        torch.manual_seed(1)
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=backwards)
        assert clearing_gradients(model, optimizer, backwards, cleared) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


def _build() -> nn.Module:
    torch.manual_seed(0)
    return Pair().train()


def _compile(
    model: nn.Module, hw: HardwareProfile, nvme: Path, policy: str, dtype: torch.dtype = torch.float32
) -> nn.Module:
    nvme.mkdir(exist_ok=True)
    return lohan_fx.compile(model, hw, nvme=nvme, compute_dtype=dtype, policy=policy, host_memory="2GiB")


def _assert_exact(make: Callable[[], nn.Module], use: Use, hw: HardwareProfile, nvme: Path, policy: str) -> None:
    torch.manual_seed(0)
    expected = make()
    model = copy.deepcopy(expected)
    torch.manual_seed(1)
    wanted = use(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, nvme, policy)):
        torch.manual_seed(1)
        assert use(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


class Gated(nn.Module):
    """Reads both halves of a value, by ops whose schema hides that they are its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.cell, self.down = nn.Linear(24, 256), nn.GRUCell(128, 128), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value = torch.unsafe_chunk(self.up(x), 2, dim=-1)
        first, second = torch.unsafe_split_with_sizes(self.cell(F.silu(gate) * value), [64, 64], dim=-1)
        hidden = torch.cat([F.gelu(second), first.tanh()], dim=-1)
        return self.down(hidden), hidden


@pytest.mark.parametrize("policy", ["keep", "recompute", "swap-nvme"])
def test_parts_whose_op_does_not_say_that_they_are_views(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    rows = 256  # values of 256 KiB: large enough for a place in the workspace
    torch.manual_seed(0)
    expected = Gated()
    model = copy.deepcopy(expected)
    torch.manual_seed(1)
    wanted = losses_outside(expected, torch.optim.AdamW(expected.parameters(), lr=LR), rows=rows)
    with lohan_fx.releasing(_compile(model, hw, tmp_path, policy)):
        torch.manual_seed(1)
        assert losses_outside(model, lohan_fx.AdamW(model.parameters(), lr=LR), rows=rows) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


class Inverting(nn.Module):
    """An op that checks for errors, in order with others like it: its graph begins with a token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(24, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        hidden = hidden @ torch.linalg.inv(hidden.T @ hidden + torch.eye(8))
        return self.last(self.second(hidden)), hidden


class NoisyGradient(torch.autograd.Function):
    """The identity; its gradient is scaled by numbers that the forward draws and does not read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.rand_like(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (noise,) = ctx.saved_tensors
        return gradient * noise


class Checked(nn.Module):
    """Ops that run whether or not the forward reads what they make: an assertion, and draws for the backward before those of
    dropout; and an integer division, which not all values allow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._assert_async(x.isfinite().all(), "the input is not finite")
        shares = 7 // (1 + (x[:, :1] > 0).long())
        hidden = F.dropout(NoisyGradient.apply(self.first(x)), 0.2) * shares
        return self.last(hidden), hidden


class Swapping(torch.autograd.Function):
    """A product whose gradients are what went in, as it is or as views; or the same for both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if ctx.kind == "same":
            return weight, weight, None
        return weight, x if ctx.kind == "values" else x.view(-1).view(x.shape), None


class Returning(nn.Module):
    """Its custom backward returns a parameter, and what the model was called with, as gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight, self.last = kind, nn.Parameter(torch.randn(4, 24)), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = Swapping.apply(x, self.weight, self.kind)
        return self.last(hidden), hidden


@pytest.mark.parametrize("kind", ["values", "views", "same"])
@pytest.mark.parametrize("use", [losses_outside, gradients_of_inputs])
def test_gradients_that_the_backward_did_not_make(kind: str, use: Use, hw: HardwareProfile, tmp_path: Path) -> None:
    _assert_exact(functools.partial(Returning, kind), use, hw, tmp_path, "swap-nvme")


@pytest.mark.parametrize("kind", [Inverting, Checked])
@pytest.mark.parametrize("policy", POLICIES)
def test_ops_with_effects(policy: str, kind: type[nn.Module], hw: HardwareProfile, tmp_path: Path) -> None:
    _assert_exact(kind, losses_outside, hw, tmp_path, policy)


def test_a_failed_assertion_of_the_model_is_raised_and_training_goes_on(hw: HardwareProfile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Checked()
    model = copy.deepcopy(expected)
    torch.manual_seed(1)
    wanted = losses_outside(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        torch.manual_seed(1)
        losses = losses_outside(model, optimizer, steps=2)
        with pytest.raises(RuntimeError, match="the input is not finite"):
            model(torch.full((4, 24), torch.inf))
        assert losses + losses_outside(model, optimizer, steps=1) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


class Mixing(nn.Module):
    """Arithmetic with parameters themselves, by operators, methods and functions that PyTorch has in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rate, self.gain = nn.Linear(24, 8), nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8) + 1)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x).sigmoid()
        mixed = hidden * self.rate + hidden.roll(1, 0) * (1 - self.rate)
        mixed = mixed + (1 / self.gain + self.gain**2 + 2**self.rate + hidden**self.gain) * 0.1
        first, second = self.gain.split(4)
        return self.norm(mixed) / F.pad(self.gain, (1, 0)).norm(), torch.cat([first, second]) * hidden


@pytest.mark.parametrize("policy", POLICIES)
def test_arithmetic_with_parameters(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Mixing()
    model = copy.deepcopy(expected)
    torch.manual_seed(1)
    wanted = losses_outside(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, policy)):
        torch.manual_seed(1)
        assert losses_outside(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == wanted
        for refused in (lambda: 1 - model.rate, lambda: model.rate**2, model.rate.norm):
            with pytest.raises(OffloadedParameterError, match="rate, which is offloaded"):
                refused()
    assert_same_weights(weights_of(model), weights_of(expected))


class Crossing(nn.Module):
    """A dropout between two layers of which the second reads across the rows, so that its gradient comes transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across, self.dropout = nn.Linear(24, 8), nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.dropout(self.up(x[None].repeat(2, 1, 1)))
        output = self.across(hidden.transpose(1, 2))
        return output, output


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropout_whose_gradient_is_transposed(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    _assert_exact(Crossing, losses_outside, hw, tmp_path, policy)


class Branching(nn.Module):
    """One of its branches draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.up(x))
        hidden = torch.cond(x[0, 0].abs() < 9, _dropped, torch.sin, (hidden,))
        output = self.last(torch.tanh(hidden))
        return output, output


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x), 0.5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_branch_that_draws_is_not_taken_again(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    _assert_exact(Branching, losses_outside, hw, tmp_path, policy)


class Layer(nn.Module):
    """Marked to be compiled once for all calls of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(24, 48), nn.Linear(48, 24), nn.Dropout(0.2)

    @torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Marked(nn.Module):
    def __init__(self, *, under_checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.under_checkpoint = under_checkpoint

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = checkpoint(self._all, x, use_reentrant=False) if self.under_checkpoint else self._all(x)
        return x, x

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.skipif(not FLAT, reason="this version of PyTorch leaves marked layers graphs of their own")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("under_checkpoint", [False, True])
def test_layers_marked_to_be_compiled_once(
    under_checkpoint: bool, policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    make = functools.partial(Marked, under_checkpoint=under_checkpoint)
    _assert_exact(make, losses_outside, hw, tmp_path, policy)


@pytest.mark.parametrize("under_checkpoint", [False, True])
def test_marked_layers_that_stay_graphs_of_their_own(
    under_checkpoint: bool, hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan_fx.compiled_model.FLAT", {})
    model = Marked(under_checkpoint=under_checkpoint)
    lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="2GiB")
    with lohan_fx.releasing(model), pytest.raises(CaptureError, match=r"nested_compile_region.*take that mark away"):
        model(torch.randn(4, 24))


class Registers(nn.Module):
    """With none of the tokens that it could learn: a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.registers, self.up = nn.Parameter(torch.zeros(1, 0, 24)), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.cat([self.registers.expand(len(x), -1, -1), x[:, None]], dim=1)
        output = self.up(hidden).tanh()
        return output, output


def test_a_parameter_without_elements(hw: HardwareProfile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Registers()
    model = copy.deepcopy(expected)
    torch.manual_seed(1)
    wanted = losses_outside(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        torch.manual_seed(1)
        assert losses_outside(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == wanted
        assert lohan_fx.simulate(model).step_s > 0
    assert_same_weights(weights_of(model), weights_of(expected))


def test_gradients_of_the_inputs_of_a_frozen_model_need_no_optimizer(hw: HardwareProfile, tmp_path: Path) -> None:
    def use(model: nn.Module) -> list[float]:
        found = []
        for _ in range(3):
            x = torch.randn(4, 24, requires_grad=True)
            model(x)[0].square().mean().backward()
            assert x.grad is not None
            found += x.grad.flatten().tolist()
        return found

    expected, model = _build().requires_grad_(False), _build().requires_grad_(False)
    torch.manual_seed(1)
    wanted = use(expected)
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        torch.manual_seed(1)
        assert use(model) == wanted


def test_hooks_on_what_is_saved_are_refused_but_those_of_checkpoints(hw: HardwareProfile, tmp_path: Path) -> None:
    """They would copy parameters of which there is no memory, and crash the process."""

    def use(model: nn.Module, optimizer: Any) -> Any:
        loss = checkpoint(model, torch.ones(4, 24), use_reentrant=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    expected, model = _build(), _build()
    torch.manual_seed(1)
    wanted = use(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            with torch.no_grad():
                model(torch.ones(4, 24))
            with pytest.raises(OffloadedParameterError, match=r"saved_tensors_hooks.*leave them out"):
                model(torch.ones(4, 24))
        torch.manual_seed(1)
        assert use(model, optimizer) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


def test_two_backwards_through_one_graph_are_exact_if_it_is_kept(hw: HardwareProfile, tmp_path: Path) -> None:
    def use(model: nn.Module, optimizer: Any) -> None:
        output, hidden = model(torch.ones(4, 24))
        output.sum().backward(retain_graph=True)
        hidden.sum().backward()
        optimizer.step()

    expected, model = _build(), _build()
    torch.manual_seed(1)
    use(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "keep")):
        torch.manual_seed(1)
        use(model, lohan_fx.AdamW(model.parameters(), lr=LR))
    assert_same_weights(weights_of(model), weights_of(expected))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        with pytest.raises(StepError, match="retain_graph"):
            use(model, optimizer)
        optimizer.zero_grad()
        losses_outside(model, optimizer, 1)


def balanced_experts() -> nn.Module:
    """A Mixtral whose loss has a part of its router's logits, which Transformers collects by hooks."""
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, max_position_embeddings=32, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).train()


@pytest.mark.parametrize(
    ("build", "asked"),
    [(balanced_experts, {}), (LLAMA.build, {"output_hidden_states": True})],
    ids=["experts", "hidden"],
)
def test_what_transformers_collects_by_hooks(
    build: Callable[[], nn.Module], asked: dict[str, bool], hw: HardwareProfile, tmp_path: Path
) -> None:
    def use(model: Any, optimizer: Any) -> list[float]:
        found = []
        for _ in range(3):
            output = model(**tokens(), **asked)
            loss = output.loss + (output.hidden_states[1].square().mean() if asked else 0.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected, model = build(), build()
    expected(**tokens(), **asked)  # Dynamo alone cannot trace the first call that asks
    prepare_dynamo()
    torch.manual_seed(1)
    # Traced, since experts sum gradients in another order then.
    traced = torch.compile(expected, backend="aot_eager", dynamic=False)
    wanted = use(traced, torch.optim.AdamW(expected.parameters(), lr=LR))
    torch._dynamo.reset()
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        torch.manual_seed(1)
        assert use(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


def test_gradient_checkpointing_of_a_model_that_is_told_to_cache(hw: HardwareProfile, tmp_path: Path) -> None:
    """As Transformers' configs are: it warns, by the logger of another file than the model's, and leaves out the cache."""

    def use(model: Any, optimizer: Any) -> list[float]:
        model.gradient_checkpointing_enable()
        model.config.use_cache = True
        found = []
        for _ in range(3):
            output = model(**tokens())
            assert output.past_key_values is None
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(output.loss.item())
        return found

    expected, model = GPT2_SHALLOW.build(), GPT2_SHALLOW.build()
    torch.manual_seed(1)
    wanted = use(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme")):
        torch.manual_seed(1)
        assert use(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


def test_two_models_train_side_by_side(hw: HardwareProfile, tmp_path: Path) -> None:
    """A student that learns from a teacher that learns too."""

    def use(teacher: nn.Module, student: nn.Module, kind: Any) -> list[float]:
        torch.manual_seed(1)
        of_teacher, of_student = (kind.AdamW(m.parameters(), lr=LR) for m in (teacher, student))
        losses = []
        for _ in range(3):
            losses += losses_outside(teacher, of_teacher, 1)
            x = torch.randn(4, 24)
            with torch.no_grad():
                wanted = teacher(x)[0]
            loss = F.mse_loss(student(x)[0], wanted)
            loss.backward()
            of_student.step()
            of_student.zero_grad()
            losses.append(loss.item())
        return losses

    expected, models = (_build(), _build()), (_build(), _build())
    wanted = use(*expected, torch.optim)
    teacher = lohan_fx.releasing(_compile(models[0], hw, tmp_path / "teacher", "swap-nvme"))
    student = lohan_fx.releasing(_compile(models[1], hw, tmp_path / "student", "recompute"))
    with teacher, student:
        assert use(*models, lohan_fx) == wanted
    for found, plain in zip(models, expected, strict=True):
        assert_same_weights(weights_of(found), weights_of(plain))


def test_a_frozen_bf16_base_with_a_trained_head(hw: HardwareProfile, tmp_path: Path) -> None:
    """The values of a frozen parameter are streamed in bf16 and come back as they were brought."""

    def build() -> nn.Module:
        model = PERCEPTRON.build()
        model.up.requires_grad_(False)
        return model

    expected, model, start = build(), build(), weights_of(build())
    recipe = MasterAdamW(expected, lr=LR)
    wanted = train(torch.compile(expected, backend="aot_eager", dynamic=False), recipe, PERCEPTRON)
    torch._dynamo.reset()
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "swap-nvme", torch.bfloat16)):
        trained = [p for p in model.parameters() if p.requires_grad]
        assert train(model, lohan_fx.AdamW(trained, lr=LR), PERCEPTRON) == wanted
        values = model.state_dict()
    for found in (values, weights_of(model)):
        assert_same_weights(found, {name: master.detach() for name, master in recipe.masters.items()})
        assert torch.equal(found["up.weight"], start["up.weight"])


@pytest.mark.parametrize("policy", ["swap-nvme", "in-memory"])
def test_a_frozen_parameter_rounds_what_is_loaded_wherever_it_is(
    policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        model = PERCEPTRON.build().eval()
        model.up.requires_grad_(False).bfloat16()
        return model

    expected, model, batch = build(), build(), PERCEPTRON.batch()
    values = {name: value.float() * 1.01 for name, value in expected.state_dict().items()}
    expected.load_state_dict(values)
    expected.up.float()
    with lohan_fx.releasing(_compile(model, hw, tmp_path, policy, torch.float32)):
        model(**batch)
        model.load_state_dict(values)
        assert torch.equal(model(**batch).loss, expected(**batch).loss)


def test_a_bf16_model_has_fp32_masters_and_stays_bf16(hw: HardwareProfile, tmp_path: Path) -> None:
    case = Case("bf16", lambda: PERCEPTRON.make().bfloat16(), vectors)
    expected, model = case.build(), case.build()
    recipe = MasterAdamW(expected, lr=1e-5)
    wanted = train(torch.compile(expected, backend="aot_eager", dynamic=False), recipe, case)
    torch._dynamo.reset()
    with lohan_fx.releasing(_compile(model, hw, tmp_path, "recompute", torch.bfloat16)):
        assert train(model, lohan_fx.AdamW(model.parameters(), lr=1e-5), case) == wanted
        masters = model.state_dict()
    assert_same_weights(masters, {name: master.detach() for name, master in recipe.masters.items()})
    assert_same_weights(weights_of(model), {name: p.detach() for name, p in expected.named_parameters()})
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
