"""faults: one fault of the drive in each of many trainings: it must surface as one clear error, or change nothing.

    python benchmarks/faults.py

Every kind of fault at every kind of call, at several moments of a training with checkpoints. *surfaced*: an error of
lohan_fx that names what failed; the fault being gone, the training then resumes and must end with the bits of one that
met none (with ``--keep 2`` from the checkpoint before, where the last one holds a flipped bit; with ``--keep 1`` each
checkpoint is read back before it counts, ``verify=True``). *retried*: no error, and the same bits. *silent*: anything else.
Stuck calls are waited for 3 seconds here instead of minutes. Ends with 1 if any is silent.
JSON: ``injected, surfaced, retried, silent``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import report
from faulty_drive import CALLS, FaultyDrive
from kill9 import Shared, import_all, train

from lohan_fx.errors import LohanError
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.chunk_pipeline import ChunkPipeline
from lohan_fx.runtime.generation_files import generation_path, generations_in
from lohan_fx.runtime.lanes import Lane, Work
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer

PATIENCE_S = 3.0
POLICIES = ("recompute", "swap-nvme")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a life ended: ``digest`` of what it trained, or the ``error`` that it ended with, and its type."""

    struck: bool
    digest: str = ""
    error: str = ""
    clear: bool = False
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


def live(directory: Path, drive: FaultyDrive, policy: str, result: Path, keep: int) -> Outcome:
    """A training on ``drive``, in a process of its own."""
    result.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        try:
            _be_impatient()
            outcome = _outcome(directory, drive, policy, keep)
            result.write_text(json.dumps(dataclasses.asdict(outcome)))
            result.with_name("modules").write_text("\n".join(sys.modules))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    return Outcome(**json.loads(result.read_text()))


def _outcome(directory: Path, drive: FaultyDrive, policy: str, keep: int) -> Outcome:
    try:
        digest = train(directory, drive, Shared(), policy, keep, verify=keep == 1)
        return Outcome(drive.struck, digest, counts=drive.counts)
    except Exception as error:
        causes = [error, error.__cause__, error.__context__]
        clear = any(isinstance(cause, LohanError) for cause in causes)
        return Outcome(drive.struck, error=f"{type(error).__name__}: {error}", clear=clear, counts=drive.counts)


def _be_impatient() -> None:
    """A call that never returns is given up after seconds, so that the benchmark takes minutes."""
    of_lanes = (Work.wait, Arrival.wait, Lane.drain, Lane.close, Machine.drain)
    for wait in (*of_lanes, OutOfCoreOptimizer.barrier, OutOfCoreOptimizer.settle, ChunkPipeline.wait):
        wait.__defaults__ = (PATIENCE_S,)
    NvmeStore.close.__kwdefaults__ = {"timeout_s": PATIENCE_S}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--moments", type=int, default=3, help="of a training, per policy, call and fault")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.nvme.mkdir(parents=True, exist_ok=True)
    chance, counts = random.Random(args.seed), Counter[str]()
    rows: list[tuple[str, str]] = []
    silent: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-", dir=args.nvme) as root:
        directory, result = Path(root, "store"), Path(root, "result")
        for policy in POLICIES:
            directory.mkdir()
            whole = live(directory, FaultyDrive(), policy, result, args.keep)
            assert whole.digest, whole.error
            import_all(result.with_name("modules").read_text().split())
            shutil.rmtree(directory)
            for call, faults in CALLS.items():
                for fault in faults:
                    for _ in range(min(args.moments, whole.counts[call])):
                        directory.mkdir()
                        drive = FaultyDrive(
                            call, chance.randint(1, whole.counts[call]), fault, seed=chance.randrange(99)
                        )
                        kind = _judge(directory, drive, policy, result, args.keep, whole.digest, silent)
                        counts[kind] += 1
                        shutil.rmtree(directory)
                    print(f"{policy}, {call}, {fault.value}: {dict(counts)}", file=sys.stderr, flush=True)
    counts.pop("not met", None)
    figures = {"injected": counts.total(), **{kind: counts[kind] for kind in ("surfaced", "retried", "silent")}}
    rows = [(name, str(value)) for name, value in figures.items()]
    figures["keep"] = args.keep
    report.finish("faults" if args.keep > 1 else "faults_keep1", rows, figures, silent, save=args.save)


def _judge(
    directory: Path, drive: FaultyDrive, policy: str, result: Path, keep: int, expected: str, silent: list[str]
) -> str:
    met = live(directory, drive, policy, result, keep)
    what = f"{policy}: {drive}"
    if not met.struck:
        return "not met"
    if met.digest:
        if met.digest == expected:
            return "retried"
        silent.append(f"{what}: trained on, to other bits")
        return "silent"
    again = live(directory, FaultyDrive(), policy, result, keep)
    if "are damaged" in again.error and keep > 1:
        # A bit that was flipped on its way to the drive is in the last checkpoint, too: as fsck says, one step back.
        generation_path(directory, generations_in(directory)[-1]).unlink()
        again = live(directory, FaultyDrive(), policy, result, keep)
    if met.clear and again.digest == expected:
        return "surfaced"
    silent.append(
        f"{what}: {met.error}; resumed: {again.error or ('equal' if again.digest == expected else 'other bits')}"
    )
    return "silent"


if __name__ == "__main__":
    main()
