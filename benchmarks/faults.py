"""faults: one fault of the drive in each of many trainings: it must surface as one clear error, or change nothing.

    python benchmarks/faults.py

Every kind of fault at every kind of call, at several moments of a training with checkpoints: a new one, and one that is
resumed. The trainings differ in how they make a step, and in where activations and gradients are (``WAYS``). *surfaced*: an
error of lohan_fx that names the file, or what was moved; the fault being gone, the training then resumes and must end with the
bits of one that met none (with ``--keep 2`` from the checkpoint before, where the last one holds a flipped bit; with
``--keep 1`` each checkpoint is read back before it counts, ``verify=True``). Where nothing has read it any more when the
training ends, ``fsck`` must find it, and the checkpoint before be whole. *retried*: no error, the same bits, and all
checkpoints whole. *silent*: anything else. Stuck calls are waited for 3 seconds here instead of minutes. Ends with 1 if any is
silent. JSON: ``injected, surfaced, retried, silent``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import report
from faulty_drive import CALLS, FaultyDrive
from kill9 import RECIPES, STEPS, Recipe, Shared, import_all, train

from lohan_fx.errors import LohanError, StoreError
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.chunk_pipeline import ChunkPipeline
from lohan_fx.runtime.generation_files import generation_path, generations_in
from lohan_fx.runtime.lanes import Lane, Work
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from lohan_fx.runtime.stored_extents import StoredExtents

PATIENCE_S = 3.0
STEPS_BEFORE = 3
"""Of a training that is resumed."""
NAMES = re.compile(r"layers\.\d\.(weight|bias)|extent '|swap_(in|out) of \(")
"""What an error must name, if not the file: a parameter, an extent, or an activation by its shape."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a training is made: the policy, the recipe of its steps, and whether the fault meets it in its second life."""

    policy: str
    recipe: Recipe
    resumed: bool

    def __str__(self) -> str:
        return f"{self.policy}, {self.recipe.name}{', resumed' if self.resumed else ''}"


WAYS = tuple(
    Way(policy, recipe, resumed)
    for policy, recipe in (("recompute", RECIPES[0]), ("swap-nvme", RECIPES[0]), ("recompute", RECIPES[3]))
    for resumed in (False, True)
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a life ended: ``digest`` of what it trained, or the ``error`` that it ended with, and its type."""

    struck: bool
    digest: str = ""
    error: str = ""
    clear: bool = False
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


def live(directory: Path, drive: FaultyDrive, way: Way, result: Path, keep: int, *, steps: int = STEPS) -> Outcome:
    """A training on ``drive``, in a process of its own."""
    result.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        try:
            _be_impatient()
            outcome = _outcome(directory, drive, way, keep, steps)
            result.write_text(json.dumps(dataclasses.asdict(outcome)))
            result.with_name("modules").write_text("\n".join(sys.modules))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    return Outcome(**json.loads(result.read_text()))


def _outcome(directory: Path, drive: FaultyDrive, way: Way, keep: int, steps: int) -> Outcome:
    try:
        digest = train(directory, drive, Shared(), way.policy, keep, verify=keep == 1, recipe=way.recipe, steps=steps)
        return Outcome(drive.struck, digest, counts=drive.counts)
    except Exception as error:
        causes = [cause for cause in (error, error.__cause__, error.__context__) if isinstance(cause, LohanError)]
        clear = any(str(directory) in str(cause) or NAMES.search(str(cause)) for cause in causes)
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
        directory, before, result = Path(root, "store"), Path(root, "before"), Path(root, "result")
        for way in WAYS:
            before.mkdir()
            if way.resumed:
                first = live(before, FaultyDrive(), way, result, args.keep, steps=STEPS_BEFORE)
                assert first.digest and generations_in(before), first.error
            shutil.copytree(before, directory)
            whole = live(directory, FaultyDrive(), way, result, args.keep)
            assert whole.digest, whole.error
            import_all(result.with_name("modules").read_text().split())
            shutil.rmtree(directory)
            for call, faults in CALLS.items():
                for fault in faults:
                    for _ in range(min(args.moments, whole.counts[call])):
                        shutil.copytree(before, directory)
                        drive = FaultyDrive(
                            call, chance.randint(1, whole.counts[call]), fault, seed=chance.randrange(99)
                        )
                        kind = _judge(directory, drive, way, result, args.keep, whole.digest, silent)
                        counts[kind] += 1
                        shutil.rmtree(directory)
                    print(f"{way}, {call}, {fault.value}: {dict(counts)}", file=sys.stderr, flush=True)
            shutil.rmtree(before)
    counts.pop("not met", None)
    figures = {"injected": counts.total(), **{kind: counts[kind] for kind in ("surfaced", "retried", "silent")}}
    rows = [(name, str(value)) for name, value in figures.items()]
    figures["keep"] = args.keep
    report.finish("faults" if args.keep > 1 else "faults_keep1", rows, figures, silent, save=args.save)


def _judge(
    directory: Path, drive: FaultyDrive, way: Way, result: Path, keep: int, expected: str, silent: list[str]
) -> str:
    met = live(directory, drive, way, result, keep)
    what = f"{way}: {drive}"
    if not met.struck:
        return "not met"
    if met.digest:
        whole = _whole_checkpoints(directory)
        if met.digest == expected and any(whole):
            return "retried" if all(whole) else "surfaced"
        silent.append(f"{what}: trained on, to {'other bits' if met.digest != expected else 'no whole checkpoint'}")
        return "silent"
    again = live(directory, FaultyDrive(), way, result, keep)
    if "are damaged" in again.error and keep > 1:
        # A bit that was flipped on its way to the drive is in the last checkpoint, too: as fsck says, one step back.
        generation_path(directory, generations_in(directory)[-1]).unlink()
        again = live(directory, FaultyDrive(), way, result, keep)
    if met.clear and again.digest == expected:
        return "surfaced"
    silent.append(
        f"{what}: {met.error}; resumed: {again.error or ('equal' if again.digest == expected else 'other bits')}"
    )
    return "silent"


def _whole_checkpoints(directory: Path) -> list[bool]:
    """Of each that is kept, whether all of it is what was written, as ``fsck`` looks at it; empty where none can be read."""
    try:
        with StoredExtents([directory]) as stored:
            found = [
                all(
                    stored.read(record, chunk)[1]
                    for record in manifest.extents.values()
                    for chunk in range(len(record.sums))
                )
                for manifest in stored.manifests
            ]
            return [*found, *(False for _ in stored.damaged)]
    except StoreError:
        return []


if __name__ == "__main__":
    main()
