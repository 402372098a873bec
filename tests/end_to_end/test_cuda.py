"""Trainings on a GPU, held against plain PyTorch on the same one.

    make test ARGS="-m cuda" WORKERS=1                     # on a machine with a GPU
    LOHAN_TEST_DEVICE=cpu pytest tests/end_to_end/test_cuda.py   # the same functions on a CPU, to see that they run

The reference computes on the device and updates fp32 masters on the CPU, as lohan_fx does: torch's Adam for GPUs rounds in
other places. It is ``torch.compile(backend="aot_eager")``, since some models run other kernels when they are traced: its losses
and weights are to be equal bit for bit where a reference that is trained twice is equal to itself, else within the tolerances
below, and eager PyTorch's within those.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lohan_fx
from lohan_fx.capture import prepare_dynamo
from lohan_fx.compile import compiled
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from tests.end_to_end.models import GPT2, GPT2_SHALLOW, LLAMA, PERCEPTRON, Batch, Case
from tests.end_to_end.recipes import LR, MasterAdamW, Run, assert_same, profile_of, weights_of
from tests.end_to_end.test_trainer import examples

DEVICE = os.environ.get("LOHAN_TEST_DEVICE", "cuda")
# cuBLAS reads it as it begins; without, torch.use_deterministic_algorithms promises nothing of matmuls.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Without the mark where the device is a CPU, or a machine without a GPU would skip them there too.
pytestmark = [
    *([pytest.mark.cuda] if DEVICE == "cuda" else []),
    pytest.mark.slow,
    pytest.mark.usefixtures("leak_check", "little_is_small", "deterministic"),
]

ROOT = Path(__file__).resolve().parents[2]
ONE_BACKWARD = (1, 1, 1, 1, 1)
MAX_NORM = 0.5
LOSS_TOLERANCE = 1e-4
"""Of the loss."""
WEIGHT_TOLERANCE = 1e-2
"""Of how far training moved the weight."""
POLICIES: dict[str, Decision | None] = {
    "keep": Keep(),
    "swap-host": Swap(Tier.HOST),
    "swap-nvme": Swap(Tier.NVME),
    "recompute": Recompute(),
    "lohan": None,
    "lohan-ds": None,
}
"""What is to happen to some activation of the model; None where the search decides."""

GPU_LIBRARIES_BYTES = 65 << 20
"""What cuBLAS takes from torch's allocator for itself: 32 MiB for each of two threads, and what the allocator rounds up."""

Streamed = Callable[..., Any]
Clip = Callable[[], torch.Tensor]


@pytest.fixture
def deterministic() -> Any:
    """Where torch has deterministic kernels, they are taken; of the others it warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def streamed(tmp_path: Path) -> Streamed:
    """``with streamed(model):`` trains it on the device."""

    def compile_it(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        options = {"policy": "lohan-ds", "host_memory": "2GiB", "nvme": tmp_path, **options}
        return lohan_fx.releasing(lohan_fx.compile(model, profile_of(DEVICE), compute_dtype=dtype, **options))

    return compile_it


def to_device(batch: Batch) -> Batch:
    return {name: value.to(DEVICE) for name, value in batch.items()}


def train(
    model: Any,
    optimizer: Any,
    case: Case,
    counts: Sequence[int] = ONE_BACKWARD,
    *,
    clip: Clip | None = None,
    seed: int | None = 1,
) -> list[float]:
    """A step of so many backwards for each of ``counts``; the losses, and after those of a step its norm where it is clipped.
    ``seed`` None goes on with torch's generators as they are."""
    if seed is not None:
        torch.manual_seed(seed)
    found = []
    for count in counts:
        for _ in range(count):
            loss = model(**to_device(case.batch())).loss
            loss.backward()
            found.append(loss.item())
        if clip is not None:
            found.append(clip().item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def reference(
    case: Case, counts: Sequence[int] = ONE_BACKWARD, *, dtype: torch.dtype = torch.float32, eager: bool = False
) -> Run:
    """Plain PyTorch on the device, with Adam on the CPU."""
    torch._dynamo.reset()
    prepare_dynamo()
    model = case.build().to(DEVICE)
    optimizer = MasterAdamW(model, dtype, lr=LR)
    call = model if eager else torch.compile(model, backend="aot_eager", dynamic=False)
    losses = train(call, optimizer, case, counts)
    torch._dynamo.reset()
    return Run(losses, {name: master.detach() for name, master in optimizer.masters.items()})


def clipping_reference(case: Case) -> Run:
    """As ``reference``, where the gradients are clipped on the device."""
    torch._dynamo.reset()
    prepare_dynamo()
    model = case.build().to(DEVICE)
    masters = {name: nn.Parameter(p.detach().to("cpu", copy=True)) for name, p in model.named_parameters()}
    adam, found = torch.optim.AdamW(masters.values(), lr=LR), list[float]()
    call = torch.compile(model, backend="aot_eager", dynamic=False)
    torch.manual_seed(1)
    for _ in ONE_BACKWARD:
        loss = call(**to_device(case.batch())).loss
        loss.backward()
        found += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad, parameter.grad = parameter.grad.cpu(), None
        adam.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    torch._dynamo.reset()
    return Run(found, {name: master.detach() for name, master in masters.items()})


reference_once = functools.cache(reference)


@functools.cache
def is_deterministic(case: Case) -> bool:
    """Whether plain PyTorch gives the same bits twice."""
    one, other = reference_once(case), reference(case)
    return one.losses == other.losses and all(torch.equal(one.weights[n], w) for n, w in other.weights.items())


def assert_parity(found: Run, expected: Run, case: Case) -> None:
    if is_deterministic(case):
        assert_same(found, expected)
    else:
        assert_close(found, expected, case)


def assert_close(found: Run, expected: Run, case: Case) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    begun = weights_of(case.build())
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        apart, moved = (found.weights[name] - weight).norm(), (weight - begun[name]).norm()
        assert apart <= WEIGHT_TOLERANCE * moved, f"{name} is {apart:g} away, and was moved by {moved:g}"


# --- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=str)
def test_policies_train_to_plain_pytorchs_numbers_and_move_what_they_predict(
    case: Case, policy: str, streamed: Streamed
) -> None:
    model = case.build()
    with streamed(model, policy=policy):
        optimizer, monitor = lohan_fx.AdamW(model.parameters(), lr=LR), lohan_fx.Monitor(model)
        losses = train(model, optimizer, case, ONE_BACKWARD[:-1])
        monitor.step()
        losses += train(model, optimizer, case, (1,), seed=None)
        report, plan = monitor.step(), compiled(model).plans[-1]
    found = Run(losses, weights_of(model))
    assert_parity(found, reference_once(case), case)
    assert_close(found, reference_once(case, eager=True), case)
    assert plan.device == DEVICE and plan.policy == policy
    assert plan.prediction is not None
    moved = report.nvme_read_bytes, report.nvme_written_bytes
    assert moved == (plan.prediction.nvme_read_bytes, plan.prediction.nvme_write_bytes)
    assert_decided(plan, POLICIES[policy])


def assert_decided(plan: Plan, decision: Decision | None) -> None:
    decided = {a.decision for a in plan.activations if a.bytes}
    assert decision is None or decision in decided


@pytest.mark.parametrize("policy", ["lohan", "swap-nvme"])
@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=str)
def test_bf16_is_its_recipe(case: Case, policy: str, streamed: Streamed) -> None:
    """With other kernels than fp32: other fused attention (cuDNN's on an H200), and matmuls on tensor cores."""
    model = case.build()
    with streamed(model, torch.bfloat16, policy=policy):
        losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), case)
    assert_parity(Run(losses, weights_of(model)), reference_once(case, dtype=torch.bfloat16), case)


def test_clipping_is_exact(streamed: Streamed) -> None:
    model = LLAMA.build()
    with streamed(model):
        clip = functools.partial(lohan_fx.clip_grad_norm_, list(model.parameters()), MAX_NORM)
        found = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), LLAMA, clip=clip)
    norms = found[1::2]
    assert min(norms) > MAX_NORM
    assert_parity(Run(found, weights_of(model)), clipping_reference(LLAMA), LLAMA)


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 3, 2)])
def test_accumulated_gradients_are_those_of_plain_pytorch(counts: tuple[int, ...], streamed: Streamed) -> None:
    model = GPT2.build()
    with streamed(model, policy="zero-infinity"):
        losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), GPT2, counts)
    assert_parity(Run(losses, weights_of(model)), reference(GPT2, counts), GPT2)


def test_transformers_trainer_trains_it(streamed: Streamed, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It moves the model to the GPU, where its shells are already. Plain PyTorch's Adam runs there, and rounds otherwise."""

    def losses(model: nn.Module, optimizer: Any) -> list[float]:
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path_factory.mktemp("outputs")), per_device_train_batch_size=2, learning_rate=LR, max_steps=6,
            logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=DEVICE == "cpu",
        )  # fmt: skip
        trainer = transformers.Trainer(model, settings, train_dataset=examples(), optimizers=(optimizer, None))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, model = GPT2_SHALLOW.build(), GPT2_SHALLOW.build()
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=LR))
    with streamed(model):
        found = losses(model, lohan_fx.AdamW(model.parameters(), lr=LR))
    assert len(found) == 6 and found == pytest.approx(expected, rel=LOSS_TOLERANCE)


# --- loss scaling ---------------------------------------------------------------------------------------------


def scaled(model: Any, optimizer: Any, scaler: Any, steps: int) -> list[float]:
    """Losses and the scale after each step."""
    found = []
    for _ in range(steps):
        loss = model(**to_device(PERCEPTRON.batch())).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.item(), scaler.get_scale()]
    return found


def test_fp16_is_its_recipe(streamed: Streamed) -> None:
    """The first scale overflows: it is halved until steps are made."""
    plain, model = PERCEPTRON.build().to(DEVICE), PERCEPTRON.build()
    master = MasterAdamW(plain, torch.float16, lr=LR)
    call = torch.compile(plain, backend="aot_eager", dynamic=False)
    torch.manual_seed(1)
    expected = scaled(call, master, lohan_fx.GradScaler(DEVICE, init_scale=2.0**17, growth_interval=3), 8)
    torch._dynamo.reset()
    torch.manual_seed(1)
    with streamed(model, torch.float16):
        scaler = lohan_fx.GradScaler(DEVICE, init_scale=2.0**17, growth_interval=3)
        found = scaled(model, lohan_fx.AdamW(model.parameters(), lr=LR), scaler, 8)
    assert min(expected[1::2]) < 2.0**17
    wanted = Run(expected, {name: value.detach() for name, value in master.masters.items()})
    assert_parity(Run(found, weights_of(model)), wanted, PERCEPTRON)


def test_a_step_that_overflows_is_skipped(streamed: Streamed) -> None:
    model = PERCEPTRON.build()
    with streamed(model, torch.float16):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        scaler = lohan_fx.GradScaler(DEVICE, init_scale=64.0)
        scaled(model, optimizer, scaler, 2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler.update(2.0**30)
        scaled(model, optimizer, scaler, 1)
        assert scaler.get_scale() == 2.0**29
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        scaler.update(64.0)
        scaled(model, optimizer, scaler, 1)
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert optimizer.state_dict()["state"][0]["step"] == 3.0


# --- what stays -----------------------------------------------------------------------------------------------


def test_a_resumed_training_goes_on_as_if_nothing_had_happened(streamed: Streamed, directory: Path) -> None:
    """Dropout too: the device's generator is where it was."""
    model = GPT2.build()
    with streamed(model, nvme=directory, checkpoints=1):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        train(model, optimizer, GPT2, (1, 1, 1))
        lohan_fx.checkpoint(model, optimizer)
        losses = train(model, optimizer, GPT2, (1, 1), seed=None)
    expected = Run(losses, weights_of(model))
    torch._dynamo.reset()
    model = GPT2.build()
    torch.manual_seed(99)
    with streamed(model, nvme=directory, resume_from_checkpoint=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        resumed = lohan_fx.resume(model, optimizer)
        assert resumed is not None and resumed.step == 3
        losses = train(model, optimizer, GPT2, (1, 1), seed=None)
    assert_parity(Run(losses, weights_of(model)), expected, GPT2)


@pytest.mark.parametrize("policy", ["in-memory", "recompute", "swap-nvme"])
def test_the_process_keeps_its_promises_of_memory(policy: str, tmp_path: Path) -> None:
    """In a process of its own, from before ``compile`` to the last step."""
    command = [sys.executable, "-m", "tests.end_to_end.memory_at_peak", str(tmp_path), policy, "4GiB", DEVICE]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert 0 < max(found["hwm_bytes"]) < found["promised_bytes"], found["text"]
    assert found["gpu_bytes"] <= found["planned_gpu_bytes"] + GPU_LIBRARIES_BYTES, found


@pytest.mark.parametrize("built_on", sorted({"cpu", DEVICE}))
def test_release_gives_an_ordinary_model_back_where_it_was(built_on: str, streamed: Streamed, tmp_path: Path) -> None:
    model = LLAMA.build().to(built_on)
    with streamed(model):
        losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), LLAMA)
    places = {value.device.type for value in (*model.parameters(), *model.buffers())}
    assert places == {built_on}
    assert list(tmp_path.iterdir()) == []
    found = Run(losses, {name: weight.cpu() for name, weight in weights_of(model).items()})
    assert_parity(found, reference_once(LLAMA), LLAMA)
    plain = LLAMA.build()
    plain.load_state_dict(found.weights, strict=False)
    batch = LLAMA.batch()
    with torch.no_grad():
        ours, theirs = (each.to(DEVICE)(**to_device(batch)).loss.item() for each in (model, plain))
    assert ours == theirs
