"""The main job: a Llama of 120M parameters whose parameters and optimizer states live on NVMe.

    make demo                                          # or: python examples/finetune_llama.py
    make demo ARGS="--compare --host-memory 640MiB"    # less memory, and plain PyTorch beside it

It learns, byte by byte, the sources of Python's standard library. What it prints before the first step is a
prediction; what it prints after the last one holds the measurements against it. Files on NVMe are removed at the end,
also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from plain_pytorch import Plain, train_plain
from python_sources import FILE_BEGIN, VOCABULARY, PythonSources
from tables import show_comparison, show_hardware, show_predicted_and_measured, show_stages
from torch.nn import functional as F

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.policies import POLICIES
from lohan_fx.reporting.memory_report import MemoryReport
from lohan_fx.reporting.monitor import StepReport
from lohan_fx.reporting.plan_table import plan_summary
from lohan_fx.reporting.timeline_chart import draw
from lohan_fx.runtime.timeline import Event
from lohan_fx.store_directories import default_nvme_root
from lohan_fx.units import format_bytes

STEPS = 40
FEWEST_STEPS = 8
TRAINING_S = 200
HEAD_SIZE = 64
PROMPT = "def "
TEMPERATURE = 0.8


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nvme", nargs="+", metavar="DIR", help="a directory per drive (default: a fresh one in ~/.cache/lohan_fx)")
    add("--hw", metavar="FILE", help="a hardware profile as TOML (default: measured, and kept for a day)")
    add("--device", choices=("cpu", "cuda"), help="(default: that of --hw, else cuda where there is one)")
    add("--host-memory", default="1GiB", metavar="SIZE", help="the most RAM that model and training may take (1GiB)")
    add("--policy", default="lohan", choices=POLICIES, help="how activations are treated (lohan: searched)")
    add("--compare", nargs="?", const="aot_eager", choices=("aot_eager", "eager"),
        help="train plain PyTorch as well: traced by torch.compile(backend='aot_eager'), or eager")  # fmt: skip
    add("--steps", type=count, help=f"(default: {STEPS}, or as many as are predicted to take {TRAINING_S} s)")
    add("--batch", type=count, default=4)
    add("--seq", type=count, default=128, help="bytes of text per sequence (128)")
    add("--dtype", choices=("bfloat16", "float32"),
        help="of weights and activations (default: bfloat16, or float32 where the processor has no kernels for it)")  # fmt: skip
    add("--layers", type=count, default=17)
    add("--hidden", type=count, default=768, help="a multiple of 64 (768)")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--sample", type=int, default=60, metavar="BYTES", help="how much text to generate at the end (60)")
    add("--output", type=Path, default=Path(__file__).parent / "output", metavar="DIR", help="for the PNG and the JSON")
    return parser.parse_args(argv)


def count(text: str) -> int:
    """A whole number, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


# --- what is trained ------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace) -> Any:
    """A Llama with random fp32 weights, the same for each call."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    heads = max(1, args.hidden // HEAD_SIZE)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=args.seq,
            use_cache=False,
        )
    )


def warmup_cosine(steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at a step: up over the first eighth, then down along a cosine to a tenth."""
    warmup = max(1, steps // 8)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return factor


@dataclass(frozen=True)
class Trained:
    """The losses, what the monitor reported of each step, and the events of one step.

    ``revised_peak_bytes``: where the first steps revised the plan, what ``Monitor.expected_peak_rss_bytes`` said when the new one
    had been captured, before its further steps.
    """

    losses: list[float]
    reports: list[StepReport]
    events: list[Event]
    revised_peak_bytes: list[int]


def train(
    model: Any, monitor: lohan_fx.Monitor, text: PythonSources, args: argparse.Namespace, *, record_at: int
) -> Trained:
    """The usual loop."""
    optimizer = lohan_fx.AdamW(model.parameters(), lr=args.lr, fused=True, accumulation_steps=1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(args.steps))
    losses: list[float] = []
    reports: list[StepReport] = []
    events: list[Event] = []
    revised_peak_bytes: list[int] = []
    plan = monitor.plan

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model.train()
    with lohan_fx.LiveView(args.steps, tokens_per_step=args.batch * args.seq) as live:
        monitor.step()
        for number in range(args.steps):
            stop_if_asked()
            batch = text.batch(number)
            if number == record_at:
                with monitor.record() as events:
                    losses.append(step(batch))
            else:
                losses.append(step(batch))
            reports.append(monitor.step())
            live.show(losses[-1], reports[-1])
            if monitor.plan is not plan:
                plan = monitor.plan
                revised_peak_bytes.append(monitor.expected_peak_rss_bytes())
    return Trained(losses, reports, events, revised_peak_bytes)


@torch.no_grad()
def validation_loss(model: Any, text: PythonSources) -> float:
    """Mean loss per byte on the held-out file."""
    model.eval()
    windows = text.held_out_windows()
    found = []
    for window in windows.split(1):
        # The loss is taken out here, so that this and ``generate`` call the model in one way: one graph for both.
        logits = model(input_ids=window).logits.float()
        found.append(F.cross_entropy(logits[0, :-1], window[0, 1:]).item())
    return statistics.fmean(found)


@torch.no_grad()
def generate(model: Any, args: argparse.Namespace) -> str:
    """Text after ``PROMPT``. The window is always full, padded on the right, where attention does not look."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = list(PROMPT.encode())
    for _ in range(args.sample):
        context = text[-args.seq :]
        window = torch.tensor([context + [FILE_BEGIN] * (args.seq - len(context))], device=args.device)
        logits = model(input_ids=window).logits[0, len(context) - 1].float().cpu()
        likely = F.softmax(logits[:256] / TEMPERATURE, dim=-1)
        text.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


# --- what is said about it ------------------------------------------------------------------------------------


def hardware(args: argparse.Namespace) -> HardwareProfile:
    """From --hw, from the last measurement if that is of today and was undisturbed, or measured now."""
    if args.hw:
        given = HardwareProfile.load(args.hw)
        if args.device not in (None, given.device):
            raise ValueError(f"--hw {args.hw} is of a {given.device}, and --device is {args.device}: leave one out")
        return given
    root = default_nvme_root()
    root.mkdir(parents=True, exist_ok=True)
    directories = [os.path.abspath(directory) for directory in args.nvme or [root]]  # as they are in the profile
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    saved = root / f"hardware-{device}.toml"
    hw = _measured_before(saved, directories)
    if hw is None:
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always", RuntimeWarning)
            hw = HardwareProfile.measure(directories, device=device, seconds=8)
        for doubt in doubts:
            warnings.warn(f"{doubt.message}; this profile is not kept", RuntimeWarning, stacklevel=2)
        if not doubts:
            hw.save(saved)
    if args.nvme:
        return hw
    # Without a directory in the profile, compile makes a fresh one under the same root, and removes it.
    return replace(hw, nvme=tuple(replace(drive, directory="") for drive in hw.nvme))


def _measured_before(saved: Path, directories: Sequence[str]) -> HardwareProfile | None:
    try:
        hw = HardwareProfile.load(saved)
    except (OSError, ValueError, TypeError):
        return None
    fresh = datetime.now(UTC) - datetime.fromisoformat(hw.measured_at) < timedelta(days=1)
    same = hw.is_this_machine() and not hw.is_outdated() and [drive.directory for drive in hw.nvme] == directories
    return hw if fresh and same else None


@dataclass(frozen=True)
class Outcome:
    """What the training came to. ``per_step`` holds predicted beside measured; ``peak_bytes`` is the RAM it took."""

    plan: Plan
    losses: list[float]
    validation_loss: dict[str, float]
    reports: list[StepReport]
    per_step: dict[str, dict[str, float]]
    peak_bytes: int
    events: list[Event]
    sample: str
    memory: MemoryReport


def run_streamed(model: Any, text: PythonSources, args: argparse.Namespace) -> Outcome:
    """Everything between ``compile`` and ``release``."""
    monitor = lohan_fx.Monitor(model)
    batch = text.batch(0)
    plan = lohan_fx.prepare(model, input_ids=batch, labels=batch)
    print(f"captured and planned in {monitor.step().seconds:.0f} s\n\n{plan_summary(plan)}\n", flush=True)
    assert plan.prediction is not None
    expected_peak_bytes = monitor.expected_peak_rss_bytes()
    if args.steps is None:
        args.steps = max(FEWEST_STEPS, min(STEPS, int(TRAINING_S / plan.prediction.step_s)))
    before = validation_loss(model, text)
    print(f"validation loss {before:.4f} before training", flush=True)
    trained = train(model, monitor, text, args, record_at=args.steps // 2)
    reports = trained.reports
    after = validation_loss(model, text)
    print(f"validation loss {before:.4f} before, {after:.4f} after (nats per byte)\n", flush=True)
    first, plan = plan, monitor.plan or plan
    if plan is not first:
        print(f"the first steps revised the plan; it is now\n\n{plan_summary(plan)}\n", flush=True)
        # What the new plan predicts is held against its own steps, of which the first one captured it.
        reports = [report for report in reports if report.predicted is plan.prediction]
    # The peak that is measured is that of the steps of both plans.
    expected_peak_bytes = max([expected_peak_bytes, *trained.revised_peak_bytes])
    per_step = show_predicted_and_measured(plan, reports, expected_peak_bytes)
    measured = monitor.stages()
    if measured is not None:
        show_stages(plan, reports[-1].corrected, measured)
    memory = monitor.memory()
    print(memory, end="\n\n")
    begin_s = time.perf_counter()
    sample = generate(model, args)
    print(f"{args.sample} bytes generated in {time.perf_counter() - begin_s:.0f} s:\n{sample!r}\n", flush=True)
    peak_bytes = max(report.peak_rss_bytes for report in reports) - monitor.other_rss_bytes
    validation = {"before": before, "after": after}
    return Outcome(plan, trained.losses, validation, reports, per_step, peak_bytes, trained.events, sample, memory)


def compare(args: argparse.Namespace, done: Outcome) -> dict[str, Any]:
    """Train plain PyTorch in a process of its own, on the same batches, and print both side by side."""
    where = "in RAM" if args.device == "cpu" else "on the GPU"
    print(f"plain PyTorch ({args.compare}), all of it {where}, on the same batches ...", flush=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        plain: Plain = pool.submit(train_plain, build_model, warmup_cosine, args).result()
    seconds = [report.seconds for report in done.reports]
    difference = show_comparison(done.losses, plain.losses, seconds, plain.seconds, done.peak_bytes, plain.peak_bytes)
    return {"backend": args.compare, "largest_loss_difference": difference, **asdict(plain)}


def run(args: argparse.Namespace) -> None:
    begin_s = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    hw = hardware(args)
    args.device = hw.device
    dtype = getattr(torch, args.dtype) if args.dtype else hw.usual_dtype()
    args.dtype = str(dtype).removeprefix("torch.")
    show_hardware(hw, dtype)
    text = PythonSources(batch=args.batch, seq=args.seq, seed=args.seed, device=args.device)
    model = build_model(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"Llama, {parameters / 1e6:.3g}M parameters"
    print(f"{size}: {format_bytes(14 * parameters)} with optimizer states; {text}", flush=True)
    options = {"policy": args.policy, "compute_dtype": dtype, "loss_only": True}  # ``train`` lets go of the logits
    lohan_fx.compile(model, hw, nvme=args.nvme, host_memory=args.host_memory, **options)
    with lohan_fx.releasing(model):
        done = run_streamed(model, text, args)
    compared = compare(args, done) if args.compare else None
    picture, results = args.output / "timeline.png", args.output / "results.json"
    data = {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "parameters": parameters, "losses": done.losses, "validation_loss": done.validation_loss,
        "per_step": done.per_step, "reports": [asdict(report) for report in done.reports], "sample": done.sample,
        "memory": asdict(done.memory),
        "compare": compared, "seconds": time.perf_counter() - begin_s,
        "machine": hw.machine, "versions": dict(hw.versions),
    }  # fmt: skip
    results.write_text(json.dumps(data, indent=2) + "\n")
    where = f"batch {args.batch} x {args.seq}, {args.host_memory} of RAM, policy {done.plan.policy}, {hw.device_name}"
    draw(done.events, picture, title=f"{size}: one training step ({where})", plan=done.plan)
    print(f"wrote {picture} and {results}; {data['seconds']:.0f} s in all")


_asked: list[int] = []


def ask_to_stop(kind: int, frame: object) -> None:
    """Stop as after Ctrl-C, so that the files are removed. Noted as well, because Python drops an exception that is
    raised while a finalizer runs."""
    del frame
    _asked.append(kind)
    stop_if_asked()


def stop_if_asked() -> None:
    """Raise what ends the run, if a signal has asked for it."""
    if _asked:
        raise KeyboardInterrupt if _asked[0] == signal.SIGINT else SystemExit(128 + _asked[0])


def main() -> int:
    args = parse_arguments()
    warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, ask_to_stop)
    try:
        run(args)
    except KeyboardInterrupt:
        print("\ninterrupted: the files on NVMe have been removed", file=sys.stderr)
        return 130
    except (ValueError, OSError, lohan_fx.LohanError) as error:
        print(f"finetune_llama: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
