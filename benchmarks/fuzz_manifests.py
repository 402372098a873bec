"""fuzz_manifests: mutated manifests of checkpoints: each is refused by a StoreError, or leads nowhere but into the files.

    python benchmarks/fuzz_manifests.py --manifests 100000

The mutations are under a good checksum, so that they reach the reader; what it lets pass is judged anew, piece by piece.
JSON: ``mutated, refused, accepted, wrong``. Ends with 1 if any is wrong.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import report
import torch

from lohan_fx.errors import StoreError
from lohan_fx.runtime.generation_files import read_generations
from lohan_fx.runtime.host_pool import PAGE_BYTES, HostPool, Reservation
from lohan_fx.runtime.manifest import Manifest, sealed
from lohan_fx.runtime.nvme_store import NvmeStore

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


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--manifests", type=report.at_least_one, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.nvme.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=args.nvme) as directory:
        text = original(Path(directory)).to_bytes().partition(b"\n")[2]
    chance = random.Random(args.seed)
    refused = accepted = wrong = 0
    for _ in range(args.manifests):
        body = json.loads(text)
        for _ in range(chance.randint(1, 3)):
            mutate(body, chance)
        try:
            found = Manifest.from_bytes(sealed(json.dumps(body).encode()), "mutated")
        except StoreError:
            refused += 1
            continue
        except Exception as error:
            print(f"{type(error).__name__}: {error}: {body}")
            wrong += 1
            continue
        accepted += 1
        wrong += is_wrong(found)
    figures = {"mutated": args.manifests, "refused": refused, "accepted": accepted, "wrong": wrong}
    rows = [(name, str(value)) for name, value in figures.items()]
    report.finish("fuzz_manifests", rows, figures, [f"{wrong} are wrong"] if wrong else [], save=args.save)


if __name__ == "__main__":
    main()
