"""peer_harness: the systems of ``shared/peers/peer_bench.py``, one process per run, and what they trained.

The harness is called as it is; nothing of it is copied. Our own runs import its model, tokens and counters, so that
every system begins with the same weights and sees the same tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_PLACES = [folder / "shared" / "peers" / "peer_bench.py" for folder in Path(__file__).resolve().parents[1:3]]
DEFAULT_PATH = next((path for path in _PLACES if path.exists()), _PLACES[-1])
"""Inside the checkout or beside it."""
NEEDS_DEEPSPEED = "zero_"
INSTALLING = (
    "its Python has no DeepSpeed: in an environment for the peers, apt-get install libaio-dev ninja-build, then\n"
    "    pip install torch==2.13.0 transformers safetensors numpy ninja\n"
    "    pip install --no-deps deepspeed==0.19.8\n"
    "    pip install hjson msgpack py-cpuinfo psutil pydantic einops tqdm packaging\n"
    "and name its interpreter with --peer-python (or LOHAN_FX_PEER_PYTHON)"
)


@dataclass(frozen=True)
class Trained:
    """What one process of one system did: seconds of the measured steps, their median, and the losses of all steps.
    ``peak_gpu_bytes``: as torch's allocator counts them; 0 on a CPU."""

    s_per_step: float
    peak_rss_bytes: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    peak_gpu_bytes: int = 0


@dataclass(frozen=True)
class Harness:
    """``peer_bench.py`` at ``path``, run by ``python``; ``folder`` takes its files; ``device`` computes."""

    path: Path
    python: str
    folder: Path
    device: str = "cpu"

    def available(self, systems: Sequence[str]) -> list[str]:
        """Those of ``systems`` that can run; says on stderr how to install what the others need."""
        if not any(name.startswith(NEEDS_DEEPSPEED) for name in systems):
            return list(systems)
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
        if subprocess.run([self.python, "-c", look]).returncode == 0:
            return list(systems)
        left_out = [name for name in systems if name.startswith(NEEDS_DEEPSPEED)]
        print(f"left out: {', '.join(left_out)}; {INSTALLING}", file=sys.stderr, flush=True)
        return [name for name in systems if name not in left_out]

    def train(self, system: str, options: Sequence[str], *, steps: int, warmup: int) -> Trained:
        """Train with ``system`` (``+ckpt`` recomputes blocks) in a process of its own."""
        name, *extras = system.split("+")
        command = [self.python, str(self.path), name, *options, "--steps", str(steps), "--warmup", str(warmup)]
        command += ["--device", self.device, "--nvme-dir", str(self.folder), *(f"--{extra}" for extra in extras)]
        environment = {
            "DS_ACCELERATOR": self.device,
            "TORCH_EXTENSIONS_DIR": str(Path.home() / ".cache" / "lohan_fx" / "torch_extensions"),
            **os.environ,
            # As if its environment were activated: pip's ninja is there.
            "PATH": f"{Path(self.python).absolute().parent}:{os.environ.get('PATH', '')}",
        }
        found = last_line(command, system, environment)
        return Trained(
            s_per_step=found["sec_per_step_median"],
            peak_rss_bytes=found["peak_rss_total_mb"] << 20,
            losses=tuple(found["loss"]),
            seconds=tuple(found["sec_per_step_all"][found["warmup"] :]),
            peak_gpu_bytes=found.get("peak_cuda_mb", 0) << 20,
        )


def last_line(command: Sequence[str], system: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON that ``command`` prints last. What it says on stderr is shown only where it fails."""
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        sys.exit(f"{system} failed with exit code {run.returncode}: {' '.join(command)}\n{run.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def loaded(path: Path) -> ModuleType:
    """The harness as a module."""
    spec = importlib.util.spec_from_file_location("peer_bench", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path}: the peer harness is not there; name it with --harness (or LOHAN_FX_PEERS)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_of(harness: ModuleType, options: Sequence[str]) -> argparse.Namespace:
    """What the harness makes of ``options``: sizes, recipe and seed with its own defaults."""
    with mock.patch.object(sys, "argv", [str(harness.__file__), "plain", *options]):
        found: argparse.Namespace = harness.parse()
    return found


def merged(runs: Sequence[Trained]) -> Trained:
    """The runs of all rounds as one: the median of medians, the highest peak, the losses of the first."""
    return Trained(
        s_per_step=statistics.median(run.s_per_step for run in runs),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        losses=runs[0].losses,
        seconds=tuple(seconds for run in runs for seconds in run.seconds),
        peak_gpu_bytes=max(run.peak_gpu_bytes for run in runs),
    )
