"""workload: the models, data and training loops that the benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import transformers
from transformers.initialization import no_init_weights

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.models.dit import DiT, example_inputs
from lohan_fx.planning.self_check import typical

SIZES = {
    # layers, hidden, heads, key-value heads, feed-forward, vocabulary
    "tiny": (2, 128, 4, 2, 352, 512),
    "demo": (17, 768, 12, 6, 2048, 320),
    "demo6": (6, 768, 12, 6, 2048, 320),
    "125m": (12, 768, 12, 12, 2048, 32000),
    "350m": (24, 1024, 16, 16, 2816, 32000),
    "1.3b": (24, 2048, 16, 16, 5632, 32000),
    "3b": (36, 2560, 20, 20, 6912, 32000),
}
GPT2_SIZES = {"gpt2": (12, 768, 12, 50257)}
"""Layers, hidden, heads, vocabulary of GPT-2 models, without dropout."""
DIT_SIZES = {"dit-77m": (16, 512, 8)}
"""Depth, width, heads of diffusion transformers, of a thousand classes. Their tokens are the patches of a square."""

BFLOAT16 = "bfloat16"
LR = 1e-4


@dataclass(frozen=True)
class Workload:
    """A Llama of ``SIZES[size]`` (or one of ``GPT2_SIZES`` or ``DIT_SIZES``) at ``batch`` x ``seq`` random tokens, its
    weights and activations in ``dtype``; of so many ``layers`` instead, if given (Llama)."""

    size: str
    batch: int
    seq: int
    layers: int | None = None
    dtype: str = BFLOAT16

    def build(self) -> Any:
        """The model in its dtype, on the CPU, the same for each call."""
        model = self._unset()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                else:
                    parameter.fill_(1.0)
        return model.train()

    def build_on_meta(self) -> Any:
        """The model in its dtype without any values; ``lohan_fx.compile`` sets them, as Hugging Face would."""
        with torch.device("meta"):
            return self._unset().train()

    def _unset(self) -> Any:
        """The model in its dtype, its weights not initialised."""
        transformers.logging.set_verbosity_error()
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with no_init_weights():
                if self.size in DIT_SIZES:
                    return self._dit()
                return self._gpt2() if self.size in GPT2_SIZES else self._llama()
        finally:
            torch.set_default_dtype(default)

    def _llama(self) -> Any:
        layers, hidden, heads, kv_heads, ffn, vocabulary = SIZES[self.size]
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=self.layers or layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=max(self.seq, 16),
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    def _gpt2(self) -> Any:
        layers, hidden, heads, vocabulary = GPT2_SIZES[self.size]
        config = transformers.GPT2Config(
            n_layer=layers,
            n_embd=hidden,
            n_head=heads,
            vocab_size=vocabulary,
            n_positions=max(self.seq, 16),
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)

    def _dit(self) -> DiT:
        depth, width, heads = DIT_SIZES[self.size]
        return DiT(width=width, heads=heads, depth=depth, latent=self._latent)

    @property
    def _latent(self) -> int:
        """Side of a DiT's latent, of which two by two make a token."""
        side = math.isqrt(self.seq)
        if side**2 != self.seq:
            raise ValueError(f"a DiT over {self.seq} tokens: a square of patches has {side**2} or {(side + 1) ** 2}")
        return 2 * side

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model is called with, the same for each call."""
        if self.size not in DIT_SIZES:
            tokens = self.tokens()
            return {"input_ids": tokens, "labels": tokens}
        generator = torch.Generator().manual_seed(1)
        found = example_inputs(self.batch, self._latent)
        for name, most in (("timesteps", 1000), ("labels", 1001)):
            found[name].random_(most, generator=generator)
        for name in ("latents", "noise"):
            found[name].normal_(generator=generator)
        return found

    def tokens(self) -> torch.Tensor:
        """Of a language model."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = GPT2_SIZES[self.size][3] if self.size in GPT2_SIZES else SIZES[self.size][5]
        return torch.randint(0, vocabulary, (self.batch, self.seq), generator=generator)


@dataclass(frozen=True)
class Case:
    """A workload in a promised memory, as several benchmarks measure it."""

    size: str
    batch: int
    seq: int
    host_memory: str
    dtype: str = field(default=BFLOAT16, kw_only=True)

    def __str__(self) -> str:
        return f"{self.size} {self.batch}x{self.seq} {self.host_memory}{self._unusual_dtype}"

    @property
    def _unusual_dtype(self) -> str:
        return "" if self.dtype == BFLOAT16 else f" {self.dtype}"

    @property
    def workload(self) -> Workload:
        return Workload(self.size, self.batch, self.seq, dtype=self.dtype)


AnyCase = TypeVar("AnyCase", bound=Case)
Numbered = TypeVar("Numbered")


def case_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``chosen`` asks for."""
    cases_argument(parser)
    dtype_argument(parser)


def cases_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=case_numbers, help="only these, by number, such as 0,2")


def case_numbers(given: str) -> list[int]:
    """As the type of an argument."""
    if not all(number.isdecimal() for number in given.split(",")):
        raise argparse.ArgumentTypeError(f"{given!r} are no numbers of cases: give some from 0 on, such as 0,2")
    return [int(number) for number in given.split(",")]


def dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=(BFLOAT16, "float32"), default=BFLOAT16,
        help="float32 for processors without AVX-512 or AMX, whose matmuls in bfloat16 take a hundred times as long",
    )  # fmt: skip


def chosen(cases: Sequence[AnyCase], args: argparse.Namespace) -> list[AnyCase]:
    """Those of ``cases`` that ``--cases`` names, or all, in ``--dtype``."""
    return [dataclasses.replace(case, dtype=args.dtype) for case in numbered(cases, args)]


def numbered(cases: Sequence[Numbered], args: argparse.Namespace) -> list[Numbered]:
    """Those of ``cases`` that ``--cases`` names, or all. Exits where there is no such one."""
    if unknown := [number for number in args.cases or () if number >= len(cases)]:
        sys.exit(f"--cases names {unknown[0]}: the last of {len(cases)} is {len(cases) - 1}")
    return list(cases) if args.cases is None else [cases[number] for number in args.cases]


Step = Callable[[], float]
"""Runs one training step and returns its loss."""


def plain_step(workload: Workload, *, fused: bool = True, backend: str | None = None) -> Step:
    """Plain PyTorch, all in RAM: fp32 masters and ``torch.optim.AdamW``; eager, or compiled by ``backend``."""
    model, inputs = workload.build(), workload.inputs()
    if backend is not None:
        model.compile(backend=backend)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=fused)

    def step() -> float:
        loss = model(**inputs).loss
        loss.backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
                master.grad = None
        return float(loss.item())

    return step


@dataclass
class Streamed:
    """A workload under lohan_fx: ``step`` trains, ``plan`` is what it obeys."""

    model: Any
    plan: lohan_fx.Plan
    step: Step
    optimizer: lohan_fx.AdamW

    def drain(self) -> None:
        """Wait for what the last step began: updates that run beside the next forward."""
        compiled(self.model).engine.before_reading()

    def end(self) -> dict[str, Any]:
        """The stages of its typical step (``StepCheck``); the model is released."""
        found = dataclasses.asdict(typical(compiled(self.model).checks.steps))
        lohan_fx.release(self.model)
        return found


def streamed(
    workload: Workload,
    hw: lohan_fx.HardwareProfile,
    nvme: Path,
    *,
    on_meta: bool = False,
    max_norm: float | None = None,
    **options: Any,
) -> Streamed:
    """The workload compiled by lohan_fx with ``options``, planned, not run yet. ``on_meta``: it never is in RAM whole.
    ``max_norm``: what the gradients' global norm is clipped to; None: it is not."""
    model = workload.build_on_meta() if on_meta else workload.build()
    inputs = {name: value.to(hw.device) for name, value in workload.inputs().items()}
    nvme.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"compute_dtype": getattr(torch, workload.dtype), "loss_only": True, **options}
        lohan_fx.compile(model, hw, nvme=[nvme], hold_gradients=None if max_norm is None else True, **options)
    optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True, accumulation_steps=1)
    try:
        plan = lohan_fx.prepare(model, **inputs)
    except lohan_fx.InfeasiblePlan:
        lohan_fx.release(model)  # another plan may be tried in the same directory
        raise

    def step() -> float:
        loss = model(**inputs).loss
        loss.backward()
        if max_norm is not None:
            lohan_fx.clip_grad_norm_(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return Streamed(model, plan, step, optimizer)


def memory_bytes(key: str) -> int:
    """A figure of /proc/self/status in bytes: ``VmRSS`` (now) or ``VmHWM`` (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {key}")


def stolen_core_s() -> float:
    """Seconds since the machine started in which the hypervisor gave this machine's processors to others."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def alternating(rounds: int, *runs: Callable[[], float]) -> Iterator[tuple[float, ...]]:
    """Each round calls every run once, in turn, so that a drift of the machine hits all alike."""
    for _ in range(rounds):
        yield tuple(run() for run in runs)
