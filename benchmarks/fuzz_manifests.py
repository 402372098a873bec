"""fuzz_manifests: mutated manifests of checkpoints: each is refused by a StoreError, or leads nowhere but into the files.

    python benchmarks/fuzz_manifests.py --manifests 100000

Half of them are of a store in many pieces, half of a training with param groups, buffers, a scheduler and an ``extra``. The
mutations are under a good checksum, so that they reach the reader; the places in what it lets pass are judged anew,
piece by piece, and a training's are taken up as a resume does, and exported. A ``ValueError``, as for another model's
checkpoint, refuses too. JSON: ``mutated, refused, accepted, wrong``; ``training``: the same of trainings alone. Ends with 1
if any is wrong.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
import torch
from torch import nn

import lohan_fx
from lohan_fx.checkpoints.resuming import take_up
from lohan_fx.commands.fsck_command import write_safetensors
from lohan_fx.compile import compiled
from lohan_fx.errors import StoreError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.generation_files import read_generations
from lohan_fx.runtime.host_pool import PAGE_BYTES, HostPool, Reservation
from lohan_fx.runtime.manifest import Manifest, sealed
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.stored_extents import StoredExtents

STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**70,
    1.5,
    float("nan"),
    "",
    "AA==",
    "é",
    [],
    {},
    [[]],
    4096,
)


def original(directory: Path) -> Manifest:
    """The manifest of a small store."""
    with NvmeStore([directory], stripe_bytes=PAGE_BYTES) as store, HostPool({"x": Reservation(1, 1 << 16)}) as pool:
        store.keep_generations(2)
        store.allocate({"a": 20_000, "b": 4096}, chunk_bytes={"a": 8192, "b": 4096})
        with pool.acquire("x") as buffer:
            for _ in range(2):
                store.write("a", 0, buffer.tensor.fill_(3), 20_000)
                store.commit({"step": 1})
    return read_generations([directory])[-1]


class Model(nn.Module):
    """With parameters of which one is frozen, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.linear.bias.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.norm(self.linear(x)).square().mean()
        return loss


class Training:
    """A training in ``directory`` that has made a checkpoint, and what reads one."""

    def __init__(self, directory: Path, stored: StoredExtents) -> None:
        """``stored``: a copy of the checkpoint, for the export."""
        self.model, self.optimizer, self.scheduler = _begin(directory, resume_from_checkpoint=True)
        self._stored = stored

    def take(self, manifest: Manifest) -> None:
        """All that a resume and an export do with a manifest. Raises ``StoreError`` or ``ValueError``, or is wrong."""
        engine = compiled(self.model).engine
        take_up(self.model, engine, manifest)
        lohan_fx.resume(self.model, self.optimizer, scheduler=self.scheduler)
        with Path(os.devnull).open("wb") as nowhere:
            write_safetensors(self._stored, manifest, nowhere, None)


def _begin(directory: Path, **options: Any) -> tuple[nn.Module, lohan_fx.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    hw = dataclasses.replace(HardwareProfile.preset("rtx4090-12xP5510"), device="cpu", nvme=())
    model = lohan_fx.compile(
        Model(), hw, nvme=directory, host_memory="2GiB", compute_dtype=torch.float32, checkpoints=1, **options
    )
    first, *others = model.parameters()
    optimizer = lohan_fx.AdamW([{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.1}], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


@contextmanager
def training(root: Path) -> Iterator[tuple[Training, str]]:
    """A training, and the text of its manifest."""
    directory, twin = root / "training", root / "twin"
    directory.mkdir()
    model, optimizer, scheduler = _begin(directory)
    for _ in range(2):
        model(torch.randn(4, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    lohan_fx.checkpoint(
        model, optimizer, scheduler=scheduler, extra={"seen": (1, 2.5, None), 3: torch.arange(4), "text": ["é", True]}
    )
    lohan_fx.release(model)
    shutil.copytree(directory, twin)
    text = read_generations([directory])[-1].to_bytes().decode().partition("\n")[2]
    with StoredExtents([twin]) as stored:
        found = Training(directory, stored)
        try:
            yield found, text
        finally:
            lohan_fx.release(found.model)


def mutate(body: Any, chance: random.Random) -> None:
    """Change one place of ``body``, anywhere."""
    place = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = chance.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and chance.random() < 0.85:
            place = inner
            continue
        place[key] = changed(inner, chance)
        return


def changed(value: Any, chance: random.Random) -> Any:
    """Something near ``value``, or nothing like it."""
    if isinstance(value, str) and value and chance.random() < 0.8:
        try:
            raw = bytearray(base64.b64decode(value, validate=True))
            raw[chance.randrange(len(raw))] = chance.randrange(256)
            return base64.b64encode(raw[: chance.choice([len(raw), len(raw) - 8])]).decode()
        except (ValueError, IndexError):
            return value[:-1]
    if type(value) is int and chance.random() < 0.6:
        return value + chance.choice([-4096, -1, 1, 4096])
    # A copy: later mutations may go into it.
    return copy.deepcopy(chance.choice(STRANGE))


def is_wrong(found: Manifest) -> bool:
    """Whether a place lies outside its file, twice, or a slot is not there: judged page by page."""
    pages: set[tuple[int, int]] = set()
    for record in found.extents.values():
        if any(int(number) >= len(record.slots) for number in record.current):
            return True
        for piece in (piece for slot in record.slots for piece in slot):
            if piece.nbytes > 1 << 24 or not 0 <= piece.file_index < len(found.file_bytes):
                return True
            for offset in range(piece.file_offset_bytes, piece.file_offset_bytes + piece.nbytes, PAGE_BYTES):
                page = piece.file_index, offset
                if page in pages or not 0 <= offset <= found.file_bytes[piece.file_index] - PAGE_BYTES:
                    return True
                pages.add(page)
    return False


def judge(text: str, chance: random.Random, reader: Training | None) -> str:
    """Of one mutated manifest: ``refused``, ``accepted`` or ``wrong``."""
    body = json.loads(text)
    for _ in range(chance.randint(1, 3)):
        mutate(body, chance)
    try:
        found = Manifest.from_bytes(sealed(json.dumps(body).encode()), "mutated")
        if is_wrong(found):
            raise AssertionError("it leads out of its files")
        if reader is not None:
            reader.take(found)
    except (StoreError, ValueError):
        return "refused"
    except Exception as error:
        print(f"{type(error).__name__}: {error}: {json.dumps(body)[:2000]}")
        return "wrong"
    return "accepted"


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--manifests", type=report.at_least_one, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.nvme.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=args.nvme) as folder:
        store = Path(folder, "store")
        store.mkdir()
        text = original(store).to_bytes().decode().partition("\n")[2]
        of_stores = Counter(judge(text, chance, None) for _ in range(args.manifests // 2))
        with training(Path(folder)) as (reader, text):
            of_trainings = Counter(judge(text, chance, reader) for _ in range(args.manifests - of_stores.total()))
    both = of_stores + of_trainings
    kinds = ("refused", "accepted", "wrong")
    figures: dict[str, Any] = {"mutated": both.total(), **{kind: both[kind] for kind in kinds}}
    rows = [(name, str(value)) for name, value in figures.items()]
    figures["training"] = {kind: of_trainings[kind] for kind in kinds}
    rows.append(("of trainings", str(figures["training"])))
    missed = [f"{both['wrong']} are wrong"] if both["wrong"] else []
    report.finish("fuzz_manifests", rows, figures, missed, save=args.save)


if __name__ == "__main__":
    main()
