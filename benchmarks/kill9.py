"""kill9: trainings killed at random moments and resumed, against one that was never broken. No kill may change a bit.

    python benchmarks/kill9.py --kills 100 [--device cuda]

Kills are aimed at initialisation, resume, step and commit in turn. A third comes from outside, at a random time of the phase; a
third from within, at a random call of the store to the system; a third is such a call with a power loss: what was not
synced is dropped or reordered at random (``lossy_drive``). Each training is killed up to five times and then ends; its
weights, moments and losses are compared. The trainings take turns in how they make a step (``RECIPES``): some hold
gradients until it, and update beside the next forward. Ends with 1 if anything differs. JSON: ``kills, bit_equal``, which
recipes were killed how often, and where the kills struck.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import report
import torch
from forced_holding import leave_no_memory_to_hold, update_twice
from lossy_drive import LossyDrive
from torch import nn

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.file_backend import PosixBackend
from lohan_fx.runtime.generation_files import generations_in
from lohan_fx.runtime.nvme_store import NvmeStore

STEPS = 6
WIDTH = 512
KILLS_PER_TRAINING = 5
MAX_NORM = 1e-3
"""All steps are clipped by it."""
PHASES = ("start", "compile", "resume", "step", "commit", "end", "stuck")
LAST_ENTRY = 3
"""Kills are aimed at one of the first so many steps or commits of a life."""
LIFE_TIMEOUT_S = 300.0


class Model(nn.Module):
    """Three linear layers of several chunks each, and dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return x.square().mean()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a training makes a step, and on which ``device``.

    ``steps_per_commit``: with more than one, updates of held gradients run beside a forward. ``on_nvme``: gradients wait
    there, as if the promise left no memory for them. ``twice``: updates are made twice (docs/0036).
    """

    name: str
    backwards: int = 1
    clips: bool = False
    scales: bool = False
    on_nvme: bool = False
    twice: bool = False
    steps_per_commit: int = 1
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.scales else torch.bfloat16

    def scaler(self) -> lohan_fx.GradScaler:
        """One that grows fast, so that some steps overflow and are skipped."""
        return lohan_fx.GradScaler(self.device, growth_interval=2, enabled=self.scales)

    def step(self, model: nn.Module, optimizer: lohan_fx.AdamW, scaler: lohan_fx.GradScaler) -> float:
        """One step on random batches; the sum of their losses."""
        total = 0.0
        for _ in range(self.backwards):
            loss = model(torch.randn(2, WIDTH).to(self.device, self.dtype))
            scaler.scale(loss / self.backwards).backward()
            total += loss.item()
        if self.clips:
            scaler.unscale_(optimizer)
            lohan_fx.clip_grad_norm_(model, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total


RECIPES = (
    Recipe("updates in the backward"),
    Recipe("clips and updates twice", clips=True, twice=True, steps_per_commit=2),
    Recipe("accumulates", backwards=2),
    Recipe("accumulates and clips on NVMe", backwards=2, clips=True, on_nvme=True, steps_per_commit=2),
    Recipe("scales and clips in fp16", clips=True, scales=True, steps_per_commit=3),
)
HOST_MEMORY = {"cpu": "700MiB", "cuda": "4GiB"}
"""What a training is promised. CUDA's libraries count, too."""


def recipes_on(device: str) -> tuple[Recipe, ...]:
    """``RECIPES`` on a device."""
    return tuple(dataclasses.replace(recipe, device=device) for recipe in RECIPES)


@dataclasses.dataclass(frozen=True)
class Kill:
    """When a life ends: once it has begun ``phase`` for the ``entry``-th time, after ``after_s``, or at call ``at_call`` of the
    store from then on, which ``loses`` what is not synced."""

    phase: str = "start"
    entry: int = 1
    after_s: float | None = None
    at_call: int | None = None
    loses: bool = False
    seed: int = 0


class Shared:
    """What a life tells those that survive it, in memory of both: its phase, and of each phase how often it began, how
    many seconds it took, and how many calls of the store to the system."""

    _ENTRY = struct.Struct("<qdq")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._began_s, self._before = time.monotonic(), 0
        self.calls: Callable[[], int] = lambda: 0
        self.on_phase: Callable[[str, int], None] = lambda name, entry: None

    def phase(self, name: str) -> None:
        """Another phase begins; with "start", another life."""
        now_s, calls = time.monotonic(), self.calls()
        if name == "start":
            self._memory[:] = bytes(mmap.PAGESIZE)
        else:
            entries, seconds, made = self.of(self.read())
            self._write(self.read(), entries, seconds + now_s - self._began_s, made + calls - self._before)
        self._began_s, self._before = now_s, calls
        entries, seconds, made = self.of(name)
        self._write(name, entries + 1, seconds, made)
        self._memory[0] = PHASES.index(name)
        self.on_phase(name, entries + 1)

    def read(self) -> str:
        return PHASES[self._memory[0]]

    def of(self, phase: str) -> tuple[int, float, int]:
        """How often ``phase`` began, and the seconds and calls of those times that are over."""
        entries, seconds, calls = self._ENTRY.unpack_from(self._memory, self._offset(phase))
        return int(entries), float(seconds), int(calls)

    def _write(self, phase: str, entries: int, seconds: float, calls: int) -> None:
        self._ENTRY.pack_into(self._memory, self._offset(phase), entries, seconds, calls)

    def _offset(self, phase: str) -> int:
        return 8 + PHASES.index(phase) * self._ENTRY.size


def train(
    directory: Path,
    backend: PosixBackend,
    shared: Shared,
    policy: str = "recompute",
    keep: int = 1,
    *,
    verify: bool = False,
    recipe: Recipe = RECIPES[0],
    steps: int = STEPS,
) -> str:
    """A life: resume if there is a checkpoint, go on to the last step, or to ``steps``; a hash of all that came out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shared.phase("resume" if generations_in(directory) else "compile")
    compile_module: Any = importlib.import_module("lohan_fx.compile")
    compile_module.NvmeStore = lambda *args, **options: NvmeStore(*args, **options, backend=backend)
    # So that parameters of this size are streamed, too.
    importlib.import_module("lohan_fx.planning.problem").SMALL_PARAMETER_ELEMENTS = 0  # type: ignore[attr-defined]
    model = Model()
    hw = dataclasses.replace(HardwareProfile.preset("rtx4090-12xP5510"), device=recipe.device, nvme=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lohan_fx.compile(
            model,
            hw,
            nvme=directory,
            host_memory=HOST_MEMORY[recipe.device],
            compute_dtype=recipe.dtype,
            policy=policy,
            checkpoints=keep,
            resume_from_checkpoint=True,
        )
    if recipe.on_nvme:
        leave_no_memory_to_hold(model)
    if recipe.twice:
        update_twice(model)
    optimizer, scaler = lohan_fx.AdamW(model.parameters(), lr=1e-3), recipe.scaler()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    found = lohan_fx.resume(model, optimizer, scheduler=scheduler)
    losses: list[float] = []
    if found:
        losses.extend(found.extra["losses"])
        scaler.load_state_dict(found.extra["scaler"])
    while len(losses) < steps:
        shared.phase("step")
        losses.append(recipe.step(model, optimizer, scaler))
        scheduler.step()
        if len(losses) % recipe.steps_per_commit == 0:
            shared.phase("commit")
            extra = {"losses": losses, "scaler": scaler.state_dict()}
            lohan_fx.checkpoint(model, optimizer, scheduler=scheduler, extra=extra, verify=verify)
    shared.phase("end")
    return digest(model, optimizer, losses)


def killed_life(directory: Path, kill: Kill | None, shared: Shared, recipe: Recipe) -> str:
    """``train`` on a store that ends as ``kill`` says; without one, its calls to the system are counted."""
    if kill is not None and kill.at_call is None:
        # Killed from outside, or not at all: at its own pace, on the real backend.
        return train(directory, PosixBackend(), shared, recipe=recipe)
    drive = LossyDrive(seed=kill.seed if kill else 0, loses=bool(kill and kill.loses))

    def aim(phase: str, entry: int) -> None:
        if kill is not None and kill.at_call is not None and (phase, entry) == (kill.phase, kill.entry):
            drive.die_in(kill.at_call)

    shared.calls, shared.on_phase = lambda: len(drive.calls), aim
    return train(directory, drive, shared, recipe=recipe)


def digest(model: nn.Module, optimizer: lohan_fx.AdamW, losses: list[float]) -> str:
    """A hash of weights, moments, step counts and losses."""
    found = hashlib.sha256(json.dumps(losses).encode())
    for value in model.state_dict().values():
        found.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    for entry in optimizer.state_dict()["state"].values():
        for value in entry.values():
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def live(
    directory: Path, kill: Kill | None, shared: Shared, result: Path, recipe: Recipe = RECIPES[0]
) -> tuple[bool, float]:
    """One life in a process of its own, which leaves what came out in ``result``; whether it was killed, and how long it
    lasted. Exits where it fails by itself, or does not end in ``LIFE_TIMEOUT_S``."""
    shared.phase("start")
    result.unlink(missing_ok=True)
    started_s = time.monotonic()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            result.write_text(killed_life(directory, kill, shared, recipe))
            result.with_name("modules").write_text("\n".join(sys.modules))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = _wait(process, kill, shared)
    seconds = time.monotonic() - started_s
    if seconds > LIFE_TIMEOUT_S:
        raise SystemExit(f"a life was not over after {LIFE_TIMEOUT_S:g} s, with {kill}; its files: {directory}")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True, seconds
    if status:
        raise SystemExit(f"a life failed by itself (status {status}) with {kill}: see above; its files: {directory}")
    return False, seconds


def import_all(modules: Sequence[str]) -> None:
    """What every life imports is imported once, here: they are forked from this process, and last a second then."""
    for name in modules:
        if name.split(".")[0] in ("torch", "transformers", "sympy"):
            with suppress(Exception):
                importlib.import_module(name)


def _wait(process: int, kill: Kill | None, shared: Shared) -> int:
    deadline_s = time.monotonic() + LIFE_TIMEOUT_S
    after_s = None if kill is None else kill.after_s
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        if kill is not None and after_s is not None and shared.of(kill.phase)[0] >= kill.entry:
            deadline_s, after_s = time.monotonic() + after_s, None
        if time.monotonic() > deadline_s:
            os.kill(process, signal.SIGKILL)
            return os.waitpid(process, 0)[1]
        time.sleep(0.0005)


@dataclasses.dataclass
class Span:
    """The longest that a phase has taken in a life so far, per time that it began."""

    seconds: float = 0.0
    calls: int = 0


class Killer:
    """Kills trainings in ``root`` and counts: ``kinds`` of kills, the recipes they met, the phases they ``struck``.
    ``first``: a recipe that shows what is imported."""

    def __init__(self, root: Path, seed: int, first: Recipe = RECIPES[0]) -> None:
        self.kinds: Counter[str] = Counter()
        self.recipes: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.trainings = self.unequal = 0
        self._aimed: Counter[tuple[str, str]] = Counter()
        self._chance = random.Random(seed)
        self._shared = Shared()
        self._result = root / "result"
        self._directory = root / "store"
        self._wholes: dict[str, str] = {}
        self._spans: defaultdict[tuple[str, str], Span] = defaultdict(Span)
        # Not measured: it imports everything.
        self._begin_anew()
        live(self._directory, None, self._shared, self._result, first)
        import_all(self._result.with_name("modules").read_text().split())

    def _live(self, recipe: Recipe, kill: Kill | None) -> bool:
        killed, _ = live(self._directory, kill, self._shared, self._result, recipe)
        for phase in PHASES:
            entries, seconds, calls = self._shared.of(phase)
            if entries and phase != self._shared.read():
                span = self._spans[recipe.name, phase]
                span.seconds, span.calls = max(span.seconds, seconds / entries), max(span.calls, -(-calls // entries))
        return killed

    def _begin_anew(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()

    def _whole(self, recipe: Recipe) -> str:
        """What comes out of a training that nobody kills."""
        if recipe.name not in self._wholes:
            self._begin_anew()
            self._live(recipe, None)
            self._wholes[recipe.name] = self._result.read_text()
            self._live(recipe, None)  # resumes the last checkpoint: now it is known how long that takes
        return self._wholes[recipe.name]

    def train(self, recipe: Recipe, kills: int) -> None:
        """A training that is killed ``kills`` times and then ends; one that ends before is followed by another."""
        whole = self._whole(recipe)
        self._begin_anew()
        met = 0
        while met < kills:
            kind = ("outside", "call", "power")[self.kinds.total() % 3]
            if not self._live(recipe, self._kill(kind, recipe)):
                self._judge(whole)
                self._begin_anew()
                continue
            met += 1
            self.kinds[kind] += 1
            self.recipes[recipe.name] += 1
            self.struck[self._shared.read()] += 1
        self._live(recipe, Kill(after_s=LIFE_TIMEOUT_S))
        self._judge(whole)

    def _judge(self, whole: str) -> None:
        self.trainings += 1
        self.unequal += self._result.read_text() != whole

    def _kill(self, kind: str, recipe: Recipe) -> Kill:
        """One in that phase of a life from here on that has been aimed at least, by kills of this kind."""
        first = "resume" if generations_in(self._directory) else "compile"
        phase = min((first, "commit", "step"), key=lambda phase: self._aimed[kind, phase])
        self._aimed[kind, phase] += 1
        entry = 1 if phase == first else self._chance.randint(1, LAST_ENTRY)
        span = self._spans[recipe.name, phase]
        if kind == "outside":
            return Kill(phase, entry, after_s=self._chance.uniform(0, span.seconds))
        at_call = self._chance.randint(1, max(1, span.calls))
        return Kill(phase, entry, at_call=at_call, loses=kind == "power", seed=self._chance.randrange(1 << 30))


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=report.at_least_one, default=100)
    parser.add_argument("--seed", type=int, default=0)
    report.device_argument(parser)
    args = parser.parse_args()
    args.nvme.mkdir(parents=True, exist_ok=True)
    recipes = recipes_on(args.device)
    each = min(KILLS_PER_TRAINING, -(-args.kills // len(recipes)))
    with tempfile.TemporaryDirectory(prefix="kill9-", dir=args.nvme) as root:
        killer = Killer(Path(root), args.seed, recipes[0])
        for recipe in itertools.cycle(recipes):
            left = args.kills - killer.kinds.total()
            if not left:
                break
            killer.train(recipe, min(each, left))
            done = f"{killer.kinds.total()} kills, {killer.trainings} trainings, {killer.unequal} unequal"
            print(f"{done} ({recipe.name})", file=sys.stderr, flush=True)
    figures = {
        "kills": killer.kinds.total(),
        "bit_equal": not killer.unequal,
        "trainings": killer.trainings,
        "kinds": killer.kinds,
        "recipes": killer.recipes,
        "struck": killer.struck,
    }
    rows = [(name, str(value if not isinstance(value, Counter) else dict(value))) for name, value in figures.items()]
    missed = [f"{killer.unequal} trainings differ"] if killer.unequal else []
    report.finish(report.name_on(args.device, "kill9"), rows, figures, missed, save=args.save)


if __name__ == "__main__":
    main()
