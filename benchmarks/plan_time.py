"""What an answer of ``lohan-fx plan`` takes: seconds and memory for 175B on two cores, and seconds by depth.

    python benchmarks/plan_time.py [--rounds 3] [--layers 12,24,48,96] [--save]

Each answer is a process of its own, on at most ``CORES`` cores, from start to end: imports, capture, planning and
simulation. The depths are those of one model, as wide as 175B, given as a config. Rounds alternate over all; medians
count, of memory the most. Bars: 175B in less than ``MOST_S`` and ``MOST_BYTES`` (``AIM_S`` and ``AIM_BYTES`` are aimed at),
and from the shallowest to the deepest the seconds grow by at most ``MOST_GROWTH`` of what the layers do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import at_least_one, finish

from lohan_fx.models.model_presets import named

CORES = 2
MODEL = "gpt3-175b"
OPTIONS = ("--batch", "8", "--seq", "1024", "--hw", "rtx4090-12xP5510")
MOST_S, MOST_BYTES = 180.0, 8e9
AIM_S, AIM_BYTES = 30.0, 2e9
MOST_GROWTH = 0.5


def config(layers: int) -> dict[str, Any]:
    """``MODEL`` with so many layers, as Hugging Face has it."""
    dims = named(MODEL)
    sizes = {"n_embd": dims.hidden, "n_head": dims.heads, "vocab_size": dims.vocab, "n_positions": dims.positions}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"model_type": dims.family.value, "n_layer": layers, "n_inner": dims.ffn, **sizes, **dropout}


def planned(model: str) -> list[str]:
    return [sys.executable, "-m", "lohan_fx", "plan", "--model", model, *OPTIONS]


def measured(command: Sequence[str]) -> dict[str, float]:
    """Seconds by the clock and of the processor, and peak RSS of ``command``. Raises ``CalledProcessError`` where it fails."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    start_s = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - start_s
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    # Linux counts what this process had when it forked; the command's own imports are as large.
    return {"wall_s": wall_s, "processor_s": used.ru_utime + used.ru_stime, "peak_rss_bytes": used.ru_maxrss * 1024}


def together(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One model over all rounds."""
    seconds = {key: statistics.median(found[key] for found in rounds) for key in ("wall_s", "processor_s")}
    return {**seconds, "peak_rss_bytes": max(found["peak_rss_bytes"] for found in rounds)}


def judged(answer: Mapping[str, float], depths: Sequence[Mapping[str, float]]) -> tuple[dict[str, Any], list[str]]:
    """The figures of the bars, and which bars were missed. ``depths``: shallowest first."""
    figures: dict[str, Any] = {**answer, "depths": list(depths)}
    missed = []
    if answer["wall_s"] >= MOST_S:
        missed.append(f"{MODEL} takes {answer['wall_s']:.0f} s: expected less than {MOST_S:.0f}")
    if answer["peak_rss_bytes"] >= MOST_BYTES:
        missed.append(
            f"{MODEL} takes {answer['peak_rss_bytes'] / 1e9:.1f} GB: expected less than {MOST_BYTES / 1e9:.0f}"
        )
    if len(depths) > 1:
        figures["layers_ratio"] = depths[-1]["layers"] / depths[0]["layers"]
        figures["wall_ratio"] = depths[-1]["wall_s"] / depths[0]["wall_s"]
        most = MOST_GROWTH * figures["layers_ratio"]
        if figures["wall_ratio"] > most:
            missed.append(
                f"{figures['layers_ratio']:g}x the layers take {figures['wall_ratio']:.2f}x the seconds: expected at most "
                f"{most:g}x"
            )
    return figures, missed


def told(found: Mapping[str, float]) -> str:
    return (
        f"{found['wall_s']:.1f} s, {found['processor_s']:.1f} s of the processor, peak RSS "
        f"{found['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=3, help="(default: 3)")
    parser.add_argument("--layers", default="12,24,48,96", help="shallowest first (default: 12,24,48,96)")
    parser.add_argument("--save", action="store_true", help="keep the JSON in benchmarks/results/")
    args = parser.parse_args()
    layers = [at_least_one(given) for given in args.layers.split(",")]
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="plan-time-") as folder:
        models = {MODEL: MODEL}
        for count in layers:
            path = Path(folder) / f"{count}.json"
            path.write_text(json.dumps(config(count)))
            models[str(count)] = str(path)
        for number in range(args.rounds):
            for name, model in models.items():
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
                rounds.setdefault(name, []).append(measured(planned(model)))
    depths = [{"layers": count, **together(rounds[str(count)])} for count in layers]
    figures, missed = judged(together(rounds[MODEL]), depths)
    rows = [(MODEL, f"{told(figures)} (aimed at: {AIM_S:.0f} s, {AIM_BYTES / 1e9:.0f} GB)")]
    rows += [(f"{found['layers']} layers", told(found)) for found in depths]
    if "wall_ratio" in figures:
        rows.append((f"{figures['layers_ratio']:g}x the layers", f"{figures['wall_ratio']:.2f}x the seconds"))
    finish("plan_time", rows, {"model": MODEL, **figures, "rounds": rounds}, missed, save=args.save)


if __name__ == "__main__":
    main()
