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
    """Batches of windows of ``seq`` bytes at random places, on ``device``; ``HELD_OUT`` is not among them."""

    def __init__(self, *, batch: int, seq: int, seed: int, device: str = "cpu") -> None:
        self._batch, self._seq, self._seed, self._device = batch, seq, seed, device
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in root.glob("*.py") if path.name != HELD_OUT)
        self._files = len(files)
        self._tokens = torch.cat([_tokens(path) for path in files])
        self._held_out = _tokens(root / HELD_OUT)

    def batch(self, number: int) -> torch.Tensor:
        """Batch ``number``, always the same: int64 of shape (batch, seq)."""
        generator = torch.Generator().manual_seed(1_000_000 * self._seed + number)
        starts = torch.randint(0, len(self._tokens) - self._seq, (self._batch,), generator=generator)
        return self._windows(self._tokens, starts)

    def held_out_windows(self) -> torch.Tensor:
        """Windows spread evenly over the held-out file: int64 of shape (windows, seq)."""
        last = len(self._held_out) - self._seq
        starts = torch.linspace(0, last, HELD_OUT_WINDOWS).long()
        return self._windows(self._held_out, starts)

    def _windows(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        windows = torch.stack([tokens[start : start + self._seq] for start in starts.tolist()])
        return windows.long().to(self._device)

    def __str__(self) -> str:
        return f"{len(self._tokens) / 1e6:.1f} MB of text from {self._files} files, {HELD_OUT} held out"


def _tokens(path: Path) -> torch.Tensor:
    data = torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8)
    return torch.cat([torch.tensor([FILE_BEGIN], dtype=torch.int16), data.to(torch.int16)])
