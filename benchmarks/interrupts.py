"""interrupts: trainings stopped by Ctrl-C at random moments of every phase, and resumed: soon, cleanly, to equal bits.

    python benchmarks/interrupts.py --interrupts 60 [--device cuda]

Each life of a training gets SIGINT during initialisation, resume, a step, a commit, or while the drive does not answer at
all (a read of a lane, a flush of a commit); it must end in 5 seconds, and let the next one in. Each training is interrupted
up to five times and then ends as one that never was. Where PyTorch traces, an interrupt may be lost (Python prints and
forgets what is raised in a finalizer; some C++ drops it), and the life trains on: ``lost``, which is a miss. Or that C++ calls
abort, which ends the process at once: ``aborted``, as safe as a kill. JSON: ``interrupts, bit_equal, slowest_s``, and where
they struck.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import report
from kill9 import LIFE_TIMEOUT_S, Kill, Recipe, Shared, import_all, live, recipes_on, train

from lohan_fx.errors import StoreError
from lohan_fx.runtime.file_backend import PosixBackend, lock_directory, unlock_directory

LIMIT_S = 5.0
INTERRUPTED, LOST = 130, 131
PER_TRAINING = 5
LONGEST_DELAY_S = {"compile": 0.15, "resume": 0.15, "step": 0.4, "commit": 0.02, "stuck": 0.1}


@dataclass(frozen=True)
class Interrupt:
    """SIGINT ``delay_s`` after ``phase`` began. "stuck": that the call number ``at`` of ``call`` never returns."""

    phase: str
    delay_s: float
    call: str = ""
    at: int = 0


class StuckDrive(PosixBackend):
    """One call never returns."""

    def __init__(self, interrupt: Interrupt, shared: Shared) -> None:
        self._interrupt = interrupt
        self._shared = shared
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self._stick("preadv")
        return super().preadv(fd, view, offset)

    def fdatasync(self, fd: int) -> None:
        self._stick("fdatasync")
        super().fdatasync(fd)

    def _stick(self, call: str) -> None:
        with self._lock:
            self._calls[call] += 1
            chosen = (call, self._calls[call]) == (self._interrupt.call, self._interrupt.at)
        if chosen:
            self._shared.phase("stuck")
            threading.Event().wait()


def interrupted_life(directory: Path, interrupt: Interrupt, shared: Shared, recipe: Recipe) -> tuple[int, float]:
    """One life in a process of its own; how it ended (0: it was over, or nearly, before the signal), and how long after the
    signal. Exits where it ended in any other way."""
    shared.phase("start")
    process = os.fork()
    if process == 0:
        os._exit(_live_here(directory, StuckDrive(interrupt, shared), shared, recipe))
    if not _wait_for_phase(process, interrupt.phase, shared):
        return 0, 0.0
    time.sleep(interrupt.delay_s)
    sent_s, sent_in = time.monotonic(), shared.read()
    os.kill(process, signal.SIGINT)
    deadline_s = sent_s + LIFE_TIMEOUT_S
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > deadline_s:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in (INTERRUPTED, LOST, -signal.SIGABRT) and not (
        code == 0 and sent_in == "end"
    ):  # else it was over, or nearly
        raise SystemExit(
            f"a life ended with {code} instead of {INTERRUPTED} after {interrupt}, in {sent_in}: see above"
        )
    return code, time.monotonic() - sent_s


def _live_here(directory: Path, drive: StuckDrive, shared: Shared, recipe: Recipe) -> int:
    """As a script of its own would end: the exit handlers run, but not those of the process it was forked from."""
    atexit._clear()
    raised_at: list[str] = []
    code = 1

    def interrupted(number: int, frame: FrameType | None) -> None:
        raised_at.extend(traceback.format_stack(frame))
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        train(directory, drive, shared, recipe=recipe)
        code = LOST if raised_at else 0
        if raised_at:
            print("a KeyboardInterrupt was lost that was raised here:", *raised_at, file=sys.stderr, sep="\n")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    return code


def _wait_for_phase(process: int, phase: str, shared: Shared) -> bool:
    """Whether the life came to ``phase``; else it has ended."""
    while shared.read() != phase:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended and status:
            raise SystemExit(f"a life failed by itself (status {status}) before it came to {phase}: see above")
        if ended:
            return False
        time.sleep(0.0005)
    return True


def is_locked(directory: Path) -> bool:
    """Whether the next run would be refused."""
    try:
        unlock_directory(directory, lock_directory(directory))
    except StoreError:
        return True
    return False


def choose(number: int, chance: random.Random) -> Interrupt:
    phase = ("compile", "step", "commit", "resume", "stuck")[
        number % len(LONGEST_DELAY_S)
    ]  # a training begins with the first
    delay_s = chance.uniform(0, LONGEST_DELAY_S[phase])
    if phase == "stuck":
        call, most = chance.choice([("preadv", 20), ("fdatasync", 4)])
        return Interrupt(phase, delay_s, call, chance.randint(1, most))
    return Interrupt(phase, delay_s)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--interrupts", type=report.at_least_one, default=60)
    parser.add_argument("--seed", type=int, default=0)
    report.device_argument(parser)
    args = parser.parse_args()
    args.nvme.mkdir(parents=True, exist_ok=True)
    recipe = recipes_on(args.device)[0]
    chance, shared = random.Random(args.seed), Shared()
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    trainings = unequal = left = lost = aborted = 0
    with tempfile.TemporaryDirectory(prefix="interrupts-", dir=args.nvme) as root:
        directory, result = Path(root, "store"), Path(root, "result")
        directory.mkdir()
        live(directory, Kill(after_s=LIFE_TIMEOUT_S), shared, result, recipe)
        expected = result.read_text()
        import_all(result.with_name("modules").read_text().split())
        while (done := sum(map(len, seconds.values()))) < args.interrupts:
            shutil.rmtree(directory)
            directory.mkdir()
            for number in range(min(PER_TRAINING, args.interrupts - done)):
                interrupt = choose(number, chance)
                code, took_s = interrupted_life(directory, interrupt, shared, recipe)
                lost += code == LOST
                aborted += code == -signal.SIGABRT
                if code in (INTERRUPTED, -signal.SIGABRT):
                    seconds[interrupt.phase].append(took_s)
                    left += is_locked(directory)
            live(directory, Kill(after_s=LIFE_TIMEOUT_S), shared, result, recipe)
            trainings += 1
            unequal += result.read_text() != expected
            told = {phase: f"{max(found):.2f} s" for phase, found in seconds.items()}
            print(f"{trainings} trainings, {unequal} unequal, slowest {told}", file=sys.stderr, flush=True)
    slowest_s = max(max(found) for found in seconds.values())
    figures = {
        "interrupts": sum(map(len, seconds.values())),
        "bit_equal": not unequal,
        "slowest_s": slowest_s,
        "trainings": trainings,
        "struck": {phase: len(found) for phase, found in seconds.items()},
        "slowest_by_phase_s": {phase: max(found) for phase, found in seconds.items()},
        "locks_held": left,
        "lost": lost,
        "aborted": aborted,
    }
    missed = [f"{unequal} trainings differ"] if unequal else []
    missed += [f"the slowest took {slowest_s:.1f} s"] if slowest_s > LIMIT_S else []
    missed += [f"{left} kept their lock"] if left else []
    missed += [f"{lost} more were lost, and the training went on"] if lost else []
    name = report.name_on(args.device, "interrupts")
    report.finish(name, [(k, str(v)) for k, v in figures.items()], figures, missed, save=args.save)


if __name__ == "__main__":
    main()
