"""Everything that a training script does beside the loop: evaluate, generate, save, load, resume, release."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lohan_fx
from lohan_fx import pipeline
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile, NvmeProfile
from lohan_fx.plan import Swap, Tier
from lohan_fx.planning.memory_model import at_home_bytes, resident_bytes
from tests import tiny
from tests.end_to_end.models import GPT2_SHALLOW, LLAMA, PERCEPTRON, Case, Output, tokens, vectors
from tests.end_to_end.recipes import LR, MasterAdamW, assert_same_weights, plain, train, weights_of
from tests.exhaustive import some_of

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture
def streamed(hw: HardwareProfile, tmp_path: Path) -> Any:
    """``with streamed(model):`` trains it with everything on NVMe (or by ``policy``), and releases it at the end."""

    def compile_it(
        model: nn.Module, dtype: torch.dtype = torch.float32, policy: str = "keep", **options: Any
    ) -> AbstractContextManager[nn.Module]:
        store = tmp_path / "store"
        store.mkdir(exist_ok=True)
        options = {"compute_dtype": dtype, "policy": policy, "host_memory": "2GiB", **options}
        return lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=store, **options))

    return compile_it


def adamw(model: nn.Module) -> Any:
    """torch's for an ordinary model, ours for a compiled one."""
    kind = lohan_fx if hasattr(model, "_lohan_fx") else torch.optim
    return kind.AdamW(model.parameters(), lr=LR)


# --- evaluation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["swap-host", "zero-infinity"])
def test_an_evaluation_before_training_changes_nothing_of_it(policy: str, streamed: Any) -> None:
    """Neither what leaves for the drives (there is host memory for swaps all the same) nor how far gradients may run ahead, which
    ``zero-infinity`` does not let them."""
    inputs, written, windows = tokens(), [], []
    for evaluates in (False, True):
        torch.manual_seed(0)
        with streamed(GPT2_SHALLOW.build(), policy=policy) as model:
            optimizer = adamw(model)
            if evaluates:
                with torch.no_grad():
                    model(**inputs)
            for _ in range(2):
                before = compiled(model).engine.store.bytes_written
                model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                compiled(model).engine.before_reading()
            plan, engine = compiled(model).plans[-1], compiled(model).engine
            assert plan.prediction is not None
            assert any(a.decision == Swap(Tier.HOST) for a in plan.activations)
            written.append((engine.store.bytes_written - before, plan.prediction.nvme_write_bytes))
            windows.append((engine._optimizer._window_bytes, plan.windows.gradient_bytes))
    assert written[0] == written[1]
    assert all(measured == foretold for measured, foretold in written)
    assert all(real <= planned for real, planned in windows)


@pytest.mark.parametrize("policy", some_of(["keep", "lohan"], ["lohan"]))
def test_evaluation_between_steps_is_equal_to_plain(policy: str, streamed: Any) -> None:
    def run(model: Any) -> tuple[list[float], list[torch.Tensor]]:
        optimizer, outputs = adamw(model), []
        losses = train(model, optimizer, GPT2_SHALLOW, 1)
        for length in (16, 9):
            model.eval()
            with torch.no_grad():
                outputs.append(model(**tokens(length=length)).logits)
            model.train()
            losses += train(model, optimizer, GPT2_SHALLOW, 1, seed=None)
        return losses, outputs

    expected, model = GPT2_SHALLOW.build(), GPT2_SHALLOW.build()
    expected_losses, expected_outputs = run(expected)
    with streamed(model, policy=policy):
        losses, outputs = run(model)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
    assert_same_weights(weights_of(model), weights_of(expected))


def test_evaluation_before_training_and_in_inference_mode(streamed: Any) -> None:
    expected, model = PERCEPTRON.build().eval(), PERCEPTRON.build().eval()
    batch = vectors()
    with streamed(model), torch.inference_mode():
        assert torch.equal(model(**batch).prediction, expected(**batch).prediction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_after_a_first_call_in_inference_mode(dtype: torch.dtype, streamed: Any) -> None:
    """What that call brings into memory is trained."""

    def run(model: Any, recipe: Any) -> list[float]:
        model.eval()
        with torch.inference_mode():
            model(**vectors())
        return train(model.train(), recipe, PERCEPTRON, 3)

    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    recipe = MasterAdamW(expected, lr=LR) if dtype is torch.bfloat16 else adamw(expected)
    graph = expected
    if dtype is torch.bfloat16:
        graph = torch.compile(expected, backend="aot_eager", dynamic=False)
    wanted = run(graph, recipe)
    torch._dynamo.reset()
    with streamed(model, dtype, policy="in-memory"):
        assert run(model, adamw(model)) == wanted


@pytest.mark.usefixtures("little_is_small")
def test_steps_in_inference_mode(streamed: Any) -> None:
    """As of a loop whose optimizer is called without any care for autograd."""

    def run(model: Any) -> list[float]:
        optimizer, losses = adamw(model), []
        torch.manual_seed(1)
        for _ in range(3):
            loss = model(**vectors()).loss
            loss.backward()
            with torch.inference_mode():
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    wanted = run(expected)
    with streamed(model, policy="lohan-ds", hold_gradients=True):
        assert run(model) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


class Heavy(nn.Module):
    """Parameters that take far more memory than what one row of numbers needs at work."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_what_training_keeps_in_memory_makes_room_for_an_evaluation(tmp_path: Path) -> None:
    """Training keeps all that was promised for states; an evaluation is captured beside it."""
    drive = NvmeProfile("", 2e9, 2e9, 2e9, capacity_bytes=1 << 40)
    torch.manual_seed(0)
    model, x = Heavy(), torch.randn(1, 512)
    eager = tiny.Plain(model, LR)
    lohan_fx.compile(
        model,
        tiny.profile(nvme=(drive,)),
        nvme=tmp_path,
        host_memory="118MiB",
        compute_dtype=torch.float32,
        revise=False,
    )
    with lohan_fx.releasing(model):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for _ in range(2):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert [loss.item()] == eager.step(x)
            with torch.no_grad():
                assert model(x).item() == eager.model(x).item()
        training, evaluation = compiled(model).plans
        assert at_home_bytes(evaluation) < at_home_bytes(training)
        tiny.same_weights(model, eager.model)


def test_hooks_that_come_after_the_capture_run(streamed: Any) -> None:
    def run(model: Any) -> list[float]:
        optimizer, found = adamw(model), []
        torch.manual_seed(1)
        for layer in (model.up, model.norm, model.down):
            with torch.no_grad():
                found.append(model(**vectors()).loss.item())
                hook = layer.register_forward_hook(lambda module, inputs, output: 0.5 * output)
                found.append(model(**vectors()).loss.item())
            found += train(model, optimizer, PERCEPTRON, 1, seed=None)
            hook.remove()
            found += train(model, optimizer, PERCEPTRON, 1, seed=None)
        return found

    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    wanted = run(expected)
    with streamed(model):
        assert run(model) == wanted
    assert_same_weights(weights_of(model), weights_of(expected))


@pytest.mark.parametrize("use_cache", some_of([False, True], [True]))
def test_greedy_generation_is_equal_to_plain(use_cache: bool, streamed: Any) -> None:
    expected, model = LLAMA.build().eval(), LLAMA.build().eval()
    prompt = torch.tensor([[5, 17, 3]])
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
    wanted = expected.generate(prompt, **options)
    with streamed(model):
        assert torch.equal(model.generate(prompt, **options), wanted)
    assert wanted.shape == (1, 8)


def test_a_second_shape_keeps_no_more_in_memory(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's graphs would run beside it."""
    homes = iter([(Tier.NVME, Tier.NVME), (Tier.DEVICE, Tier.HOST)])
    searched = pipeline.search
    monkeypatch.setattr(pipeline, "search", lambda *args: searched(*args).with_homes(*next(homes)))
    short, long = PERCEPTRON, Case("long", PERCEPTRON.make, lambda: vectors(batch=11))
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    wanted = [*train(expected, adam := adamw(expected), long, 2), *train(expected, adam, short, 2, seed=None)]
    with streamed(model, policy="lohan"):
        adam = adamw(model)
        assert [*train(model, adam, long, 2), *train(model, adam, short, 2, seed=None)] == wanted
        first, second = compiled(model).plans
    assert sum(resident_bytes(second)) <= sum(resident_bytes(first)) and "earlier shape" in second.notes[-1]
    assert second.prediction is not None and second.prediction.nvme_write_bytes
    assert_same_weights(weights_of(model), weights_of(expected))


def test_what_was_tied_since_is_released_as_one(streamed: Any) -> None:
    model = TwoOfOneShape()
    with streamed(model):
        model.second.weight = model.first.weight
        optimizer = adamw(model)
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        trained = model.state_dict()["first.weight"]
    assert model.second.weight is model.first.weight and torch.equal(model.second.weight, trained)


class TwoOfOneShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


# --- shapes ---------------------------------------------------------------------------------------------------


def test_a_second_shape_trains_the_same_states(streamed: Any) -> None:
    short, long = PERCEPTRON, Case("long", PERCEPTRON.make, lambda: vectors(batch=11))

    def run(model: Any) -> list[float]:
        optimizer = adamw(model)
        losses = train(model, optimizer, short, 2)
        losses += train(model, optimizer, long, 2, seed=None)
        return losses + train(model, optimizer, short, 1, seed=None)

    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    expected_losses = run(expected)
    with streamed(model):
        assert run(model) == expected_losses
        assert len(compiled(model).plans) == 2
    assert_same_weights(weights_of(model), weights_of(expected))


# --- saving and loading ---------------------------------------------------------------------------------------


def test_state_dict_holds_the_fp32_values_under_the_models_names(streamed: Any) -> None:
    expected, model = GPT2_SHALLOW.build(), GPT2_SHALLOW.build()
    train(expected, adamw(expected), GPT2_SHALLOW, 2)
    with streamed(model):
        train(model, adamw(model), GPT2_SHALLOW, 2)
        found = model.state_dict()
    assert_same_weights(found, expected.state_dict())


def test_a_bf16_runs_state_dict_is_its_masters(streamed: Any) -> None:
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    start = weights_of(expected)
    with streamed(model, torch.bfloat16):
        before = model.state_dict()
        losses = train(model, adamw(model), PERCEPTRON, 2)
        after = model.state_dict()
    assert_same_weights(before, start)
    torch._dynamo.reset()
    recipe = MasterAdamW(expected, lr=LR)
    assert losses == train(torch.compile(expected, backend="aot_eager", dynamic=False), recipe, PERCEPTRON, 2)
    assert_same_weights(after, {name: master.detach() for name, master in recipe.masters.items()})


@pytest.mark.parametrize("policy", ["keep", "in-memory"])
def test_training_resumes_in_another_model_from_both_state_dicts(policy: str, streamed: Any) -> None:
    first, second = GPT2_SHALLOW.build(), GPT2_SHALLOW.build()
    with streamed(first, policy=policy):
        optimizer = adamw(first)
        losses = train(first, optimizer, GPT2_SHALLOW, 2)
        saved, saved_states = first.state_dict(), copy.deepcopy(optimizer.state_dict())
    with torch.random.fork_rng(), torch.no_grad():
        for parameter in second.parameters():
            parameter.normal_()
    with streamed(second, policy=policy):
        second.load_state_dict(saved)
        optimizer = adamw(second)
        optimizer.load_state_dict(saved_states)
        losses += train(second, optimizer, GPT2_SHALLOW, 3, seed=None)
    expected = plain(GPT2_SHALLOW, 5)
    assert losses == expected.losses
    assert_same_weights(weights_of(second), expected.weights)


def test_loading_over_a_trained_model_goes_back(streamed: Any) -> None:
    """As at a spike in the loss: parameters and states of an earlier step, in the same compiled model."""

    def run(model: Any) -> list[float]:
        optimizer = adamw(model)
        losses = train(model, optimizer, PERCEPTRON, 2)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        states = copy.deepcopy(optimizer.state_dict())
        losses += train(model, optimizer, PERCEPTRON, 2, seed=None)
        model.load_state_dict(saved)
        optimizer.load_state_dict(states)
        return losses + train(model, optimizer, PERCEPTRON, 2)

    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    expected_losses = run(expected)
    with streamed(model):
        assert run(model) == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


def test_states_are_exchanged_with_torch_both_ways(streamed: Any) -> None:
    first, second, third = (PERCEPTRON.build() for _ in range(3))
    torch_optimizer = adamw(first)
    losses = train(first, torch_optimizer, PERCEPTRON, 2)
    with streamed(second):
        second.load_state_dict(first.state_dict())
        optimizer = adamw(second)
        optimizer.load_state_dict(torch_optimizer.state_dict())
        losses += train(second, optimizer, PERCEPTRON, 2, seed=None)
        values, states = second.state_dict(), optimizer.state_dict()
    third.load_state_dict(values)
    torch_optimizer = adamw(third)
    torch_optimizer.load_state_dict(states)
    losses += train(third, torch_optimizer, PERCEPTRON, 1, seed=None)
    expected = plain(PERCEPTRON, 5)
    assert losses == expected.losses
    assert_same_weights(weights_of(third), expected.weights)


@pytest.mark.parametrize("case", [GPT2_SHALLOW, LLAMA], ids=str)
def test_save_pretrained_writes_a_model_that_loads(case: Case, streamed: Any, tmp_path: Path) -> None:
    expected, model = case.build(), case.build()
    train(expected, adamw(expected), case, 1)
    with streamed(model):
        train(model, adamw(model), case, 1)
        model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(weights_of(loaded), weights_of(expected))
    for file in (tmp_path / "saved").iterdir():
        file.unlink()


def test_what_is_saved_loads_as_the_masters(streamed: Any, tmp_path: Path) -> None:
    """Transformers would note the dtype that was computed in, and round what is loaded to it."""
    model = LLAMA.build()
    with streamed(model, compute_dtype=torch.bfloat16):
        train(model, adamw(model), LLAMA, 1)
        model.save_pretrained(tmp_path / "saved")
        masters = model.state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(value, masters[name]) for name, value in loaded.state_dict().items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    assert "save_pretrained" not in vars(model)
    for file in (tmp_path / "saved").iterdir():
        file.unlink()


# --- release --------------------------------------------------------------------------------------------------


def test_release_gives_an_ordinary_model_that_trains_on(streamed: Any, tmp_path: Path) -> None:
    model = GPT2_SHALLOW.build()
    with streamed(model):
        losses = train(model, adamw(model), GPT2_SHALLOW, 1)
        assert list((tmp_path / "store").iterdir())
    assert not list((tmp_path / "store").iterdir())
    assert all(type(p) is nn.Parameter and p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight, "tied weights came apart"
    assert losses == plain(GPT2_SHALLOW, 1).losses
    assert_same_weights(weights_of(model), plain(GPT2_SHALLOW, 1).weights)
    train(model, adamw(model), GPT2_SHALLOW, 1)
    assert not torch.equal(model.lm_head.weight, plain(GPT2_SHALLOW, 1).weights["transformer.wte.weight"])


def test_a_released_model_can_be_compiled_again(streamed: Any) -> None:
    model, expected = PERCEPTRON.build(), PERCEPTRON.build()
    for number in range(3):
        with streamed(model, policy=("keep", "swap-nvme", "in-memory")[number]):
            losses = train(model, adamw(model), PERCEPTRON, 1, seed=number)
        assert losses == train(expected, adamw(expected), PERCEPTRON, 1, seed=number)
    assert_same_weights(weights_of(model), weights_of(expected))


# --- what is not a parameter ----------------------------------------------------------------------------------


class Normalized(nn.Module):
    """Batch norm, whose running statistics are buffers that a forward in training mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        prediction = self.layers(x)
        return Output((prediction - y).square().mean(), prediction)


NORMALIZED = Case("normalized", Normalized, vectors)


@pytest.mark.parametrize("policy", ["keep", "recompute", "swap-nvme"])
def test_buffers_change_as_in_plain(policy: str, streamed: Any) -> None:
    expected, model = NORMALIZED.build(), NORMALIZED.build()
    expected_losses = train(expected, adamw(expected), NORMALIZED)
    with streamed(model, policy=policy):
        assert train(model, adamw(model), NORMALIZED) == expected_losses
    assert_same_weights(model.state_dict(), expected.state_dict())
    assert int(model.layers[1].num_batches_tracked) == 5


def test_prepare_runs_nothing(streamed: Any) -> None:
    expected, model = NORMALIZED.build(), NORMALIZED.build()
    expected_losses = train(expected, adamw(expected), NORMALIZED, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = vectors()
    with streamed(model):
        generator = torch.get_rng_state()
        plan = lohan_fx.prepare(model, **batch)
        assert torch.equal(torch.get_rng_state(), generator)
        assert_same_weights(model.state_dict(), before)
        assert plan.prediction is not None and plan is lohan_fx.prepare(model, **batch)
        assert train(model, adamw(model), NORMALIZED, 2) == expected_losses
        assert len(compiled(model).plans) == 1
    assert_same_weights(model.state_dict(), expected.state_dict())


def test_prepare_returns_the_plan_of_its_inputs(streamed: Any) -> None:
    with streamed(PERCEPTRON.build(), dynamic=False) as model:
        short = lohan_fx.prepare(model, **vectors())
        long = lohan_fx.prepare(model, **vectors(batch=11))
        with torch.no_grad():
            looked = lohan_fx.prepare(model, **vectors())
        assert len({id(plan) for plan in (short, long, looked)}) == 3
        assert lohan_fx.prepare(model, **vectors()) is short and lohan_fx.prepare(model, **vectors(batch=11)) is long


def test_an_evaluation_leaves_no_more_memory_to_gradients(streamed: Any) -> None:
    with streamed(PERCEPTRON.build()) as model:
        optimizer, held = adamw(model), compiled(model).engine.gradients
        train(model, optimizer, PERCEPTRON, 1)
        left = held.hold_bytes
        with torch.no_grad():
            model(**vectors())
        assert left and held.hold_bytes == left
        train(model, optimizer, Case("short", PERCEPTRON.make, lambda: vectors(batch=2)), 1)
        assert held.hold_bytes <= left


# --- bytes ----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Parameters large beside a page."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Output:
        for layer in self.layers:
            x = layer(x).relu()
        return Output(x.square().mean(), x)


WIDE = Case("wide", Wide, lambda: {"x": torch.randn(2, 256).bfloat16()})


def test_gradients_do_not_touch_the_disk_after_the_first_step(streamed: Any) -> None:
    model = WIDE.build()
    numel = sum(p.numel() for p in model.parameters())
    with streamed(model, torch.bfloat16):
        optimizer = adamw(model)
        prediction = lohan_fx.prepare(model, **WIDE.batch()).prediction
        # Without room in RAM, the gradients of the first step, whose backwards nobody has counted, show on the disk.
        compiled(model).engine.gradients.hold_bytes = 0
        held, *later = [_traffic(model, optimizer) for _ in range(3)]
    assert prediction is not None and prediction.nvme_write_bytes == 14 * numel
    # The first layer's input needs no gradient, so its weight is not fetched again.
    assert prediction.nvme_read_bytes == (2 + 12) * numel + 2 * 2 * numel // 3
    # Whole pages, so nothing is padded.
    assert later == [(prediction.nvme_read_bytes, prediction.nvme_write_bytes)] * 2
    assert held == (prediction.nvme_read_bytes + 4 * numel, prediction.nvme_write_bytes + 4 * numel)


def test_the_first_steps_gradients_are_held_in_ram_where_there_is_room(streamed: Any) -> None:
    with streamed(WIDE.build(), torch.bfloat16) as model:
        moved = _traffic(model, adamw(model))
        prediction = compiled(model).plans[0].prediction
    assert prediction is not None and moved == (prediction.nvme_read_bytes, prediction.nvme_write_bytes)


def _traffic(model: nn.Module, optimizer: Any) -> tuple[int, int]:
    """Bytes read and written by one step."""
    store = compiled(model).engine.store
    read, written = store.bytes_read, store.bytes_written
    train(model, optimizer, WIDE, 1)
    return store.bytes_read - read, store.bytes_written - written


# --- autocast -------------------------------------------------------------------------------------------------


def test_within_autocast_the_numbers_are_those_of_aot_eager(streamed: Any) -> None:
    """What ``bf16=True`` of the Trainer comes to, for a model that computes in fp32."""

    def losses(model: nn.Module, call: Any) -> list[float]:
        optimizer = adamw(model)
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(**vectors()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    reference = PERCEPTRON.build()
    expected = losses(reference, torch.compile(reference, backend="aot_eager", dynamic=False))
    torch._dynamo.reset()
    with streamed(PERCEPTRON.build()) as model:
        found = losses(model, model)
    assert found == expected
    assert_same_weights(weights_of(model), weights_of(reference))
