"""kill9: trainings killed at random moments and resumed, against one that was never broken. No kill may change a bit.

    python benchmarks/kill9.py --kills 100

A third of the kills comes from outside, at a random time of a life; a third from within, at a random call of the store
to the system, also in the middle of a commit; a third is such a call with a power loss: what was not synced is dropped
or reordered at random (``lossy_drive``). Each training is killed up to five times, then ends, and its weights, moments and
losses are compared. Ends with 1 if anything differs. JSON: ``kills, bit_equal``, and where the kills struck.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
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
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import report
import torch
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
PHASES = ("start", "compile", "resume", "step", "commit", "end", "stuck")
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
class Kill:
    """When a life ends: after ``after_s``, or at call ``at_call`` of the store, which ``loses`` what is not synced."""

    after_s: float | None = None
    at_call: int | None = None
    loses: bool = False
    seed: int = 0


class Shared:
    """What a life tells those that survive it, in memory of both: its phase, and its calls to the system so far."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def phase(self, name: str) -> None:
        self._memory[0] = PHASES.index(name)

    def calls(self, count: int) -> None:
        self._memory[8:16] = struct.pack("<q", count)

    def read(self) -> tuple[str, int]:
        (calls,) = struct.unpack("<q", self._memory[8:16])
        return PHASES[self._memory[0]], int(calls)


def train(
    directory: Path,
    backend: PosixBackend,
    shared: Shared,
    policy: str = "recompute",
    keep: int = 1,
    *,
    verify: bool = False,
) -> str:
    """A life: resume if there is a checkpoint, go on to the last step; a hash of all that came out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shared.phase("resume" if generations_in(directory) else "compile")
    compile_module: Any = importlib.import_module("lohan_fx.compile")
    compile_module.NvmeStore = lambda *args, **options: NvmeStore(*args, **options, backend=backend)
    # So that parameters of this size are streamed, too.
    importlib.import_module("lohan_fx.problem").SMALL_PARAMETER_ELEMENTS = 0  # type: ignore[attr-defined]
    model = Model()
    hw = dataclasses.replace(HardwareProfile.preset("rtx4090-12xP5510"), device="cpu", nvme=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lohan_fx.compile(
            model,
            hw,
            nvme=directory,
            host_memory="700MiB",
            policy=policy,
            checkpoints=keep,
            resume_from_checkpoint=True,
        )
    optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    found = lohan_fx.resume(model, optimizer, scheduler=scheduler)
    losses: list[float] = list(found.extra) if found else []
    while len(losses) < STEPS:
        shared.phase("step")
        batch = torch.randn(2, WIDTH).bfloat16()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        shared.phase("commit")
        lohan_fx.checkpoint(model, optimizer, scheduler=scheduler, extra=losses, verify=verify)
    shared.phase("end")
    return digest(model, optimizer, losses)


def killed_life(directory: Path, kill: Kill | None, shared: Shared) -> str:
    """``train`` on a store that ends as ``kill`` says; without one, its calls to the system are counted."""
    if kill is not None and kill.at_call is None:
        # Killed from outside, or not at all: at its own pace, on the real backend.
        return train(directory, PosixBackend(), shared)
    drive = LossyDrive(kill.at_call if kill else None, seed=kill.seed if kill else 0, loses=bool(kill and kill.loses))
    result = train(directory, drive, shared)
    shared.calls(len(drive.calls))
    return result


def digest(model: nn.Module, optimizer: lohan_fx.AdamW, losses: list[float]) -> str:
    """A hash of weights, moments, step counts and losses."""
    found = hashlib.sha256(json.dumps(losses).encode())
    for value in model.state_dict().values():
        found.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    for entry in optimizer.state_dict()["state"].values():
        for value in entry.values():
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def live(directory: Path, kill: Kill | None, shared: Shared, result: Path) -> tuple[bool, float]:
    """One life in a process of its own; whether it was killed, and how long it lasted."""
    shared.phase("start")
    started_s = time.monotonic()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            result.write_text(killed_life(directory, kill, shared))
            result.with_name("modules").write_text("\n".join(sys.modules))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = _wait(process, started_s, kill)
    seconds = time.monotonic() - started_s
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


def _wait(process: int, started_s: float, kill: Kill | None) -> int:
    after_s = kill.after_s if kill is not None and kill.after_s is not None else LIFE_TIMEOUT_S
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() - started_s > after_s:
            os.kill(process, signal.SIGKILL)
            return os.waitpid(process, 0)[1]
        time.sleep(0.001)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.nvme.mkdir(parents=True, exist_ok=True)
    chance, shared = random.Random(args.seed), Shared()
    kinds: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    trainings = unequal = 0
    with tempfile.TemporaryDirectory(prefix="kill9-", dir=args.nvme) as root:
        result = Path(root, "result")
        directory = Path(root, "store")
        directory.mkdir()
        live(directory, None, shared, result)
        expected, calls = result.read_text(), shared.read()[1]
        import_all(result.with_name("modules").read_text().split())
        shutil.rmtree(directory)
        directory.mkdir()
        _, life_s = live(directory, Kill(after_s=LIFE_TIMEOUT_S), shared, result)
        while sum(kinds.values()) < args.kills:
            shutil.rmtree(directory)
            directory.mkdir()
            for _ in range(min(KILLS_PER_TRAINING, args.kills - sum(kinds.values()))):
                kind = ("outside", "call", "power")[sum(kinds.values()) % 3]
                if kind == "outside":
                    kill = Kill(after_s=chance.uniform(0, life_s))
                else:
                    at_call = chance.randint(1, chance.choice([8, 40, calls]))  # the first: initialisation, resume
                    kill = Kill(at_call=at_call, loses=kind == "power", seed=chance.randrange(1 << 30))
                killed, _ = live(directory, kill, shared, result)
                if not killed:
                    break
                kinds[kind] += 1
                struck[shared.read()[0]] += 1
            live(directory, Kill(after_s=LIFE_TIMEOUT_S), shared, result)
            trainings += 1
            unequal += result.read_text() != expected
            print(f"{sum(kinds.values())} kills, {trainings} trainings, {unequal} unequal", file=sys.stderr, flush=True)
    figures = {
        "kills": sum(kinds.values()),
        "bit_equal": not unequal,
        "trainings": trainings,
        "kinds": kinds,
        "struck": struck,
    }
    rows = [(name, str(value if not isinstance(value, Counter) else dict(value))) for name, value in figures.items()]
    report.finish("kill9", rows, figures, [f"{unequal} trainings differ"] if unequal else [], save=args.save)


if __name__ == "__main__":
    main()
