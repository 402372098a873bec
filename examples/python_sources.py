"""The sources of Python's standard library as bytes to learn from. They are on every machine that can run this."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

FILE_BEGIN = 256
"""Stands before each file, and pads."""
VOCABULARY = 264
HELD_OUT = "argparse.py"
HELD_OUT_WINDOWS = 24


class PythonSources:
    """Batches of windows of ``seq`` bytes at random places; ``HELD_OUT`` is not among them."""

    def __init__(self, *, batch: int, seq: int, seed: int) -> None:
        self._batch, self._seq, self._seed = batch, seq, seed
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in root.glob("*.py") if path.name != HELD_OUT)
        self._files = len(files)
        self._tokens = torch.cat([_tokens(path) for path in files])
        self._held_out = _tokens(root / HELD_OUT)

    def batch(self, number: int) -> torch.Tensor:
        """Batch ``number``, always the same: int64 of shape (batch, seq)."""
        generator = torch.Generator().manual_seed(1_000_000 * self._seed + number)
        starts = torch.randint(0, len(self._tokens) - self._seq, (self._batch,), generator=generator)
        return torch.stack([self._tokens[start : start + self._seq] for start in starts.tolist()]).long()

    def held_out_windows(self) -> torch.Tensor:
        """Windows spread evenly over the held-out file: int64 of shape (windows, seq)."""
        last = len(self._held_out) - self._seq
        starts = torch.linspace(0, last, HELD_OUT_WINDOWS).long()
        return torch.stack([self._held_out[start : start + self._seq] for start in starts.tolist()]).long()

    def __str__(self) -> str:
        return f"{len(self._tokens) / 1e6:.1f} MB of text from {self._files} files, {HELD_OUT} held out"


def _tokens(path: Path) -> torch.Tensor:
    data = torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8)
    return torch.cat([torch.tensor([FILE_BEGIN], dtype=torch.int16), data.to(torch.int16)])
