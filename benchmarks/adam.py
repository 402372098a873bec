"""The CPU's Adam update against what memory allows, torch's fused AdamW and DeepSpeed's, on the same sizes and threads.

    python benchmarks/adam.py [--rounds 15 --threads 2] [--save]

Ours is the arithmetic of a chunk's update: g16, p32, m, v in; p32, m, v, p16 out, 28 bytes per parameter. torch's is
its fused AdamW with the two casts that a bf16 model needs beside it. The copy is of as many bytes, read and written.
Buffers rotate through more memory than any cache holds. All take ``--threads``, by default as many as torch does, and have
the machine to themselves. A training is otherwise: where the CPU computes, its update lane has one thread, beside the
compute's (docs/0020), and with checkpoints that thread also finds the checksums of what it updates (docs/0040); beside a GPU
it has all cores but two. Neither checksums nor drives are in what is timed here. Bars: >= 0.85 of the copy's bandwidth, >= 1.0x
torch's, >= 1.3x DeepSpeed's where it is installed.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from report import arguments, at_least_one, finish

from lohan_fx.runtime import adam
from lohan_fx.runtime.adam import AdamOptions

CHUNK = 1 << 20
CHUNKS = 24
BUFFERS = 4
"""Of the optimizer in the runtime, each with room for the fp32 gradient."""
BYTES_PER_PARAMETER = 28
LEAST = {"ratio_to_copy": 0.85, "ratio_to_torch_fused": 1.0, "ratio_to_deepspeed": 1.3}
OPTIONS = AdamOptions(
    lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, fused=True
)

State = tuple[torch.Tensor, ...]
"""fp32 master, both moments, scratch for the fp32 gradient, bf16 gradient, bf16 copy."""


def states() -> list[State]:
    made: list[State] = []
    buffers = itertools.cycle([torch.rand(CHUNK) for _ in range(BUFFERS)])
    for _ in range(CHUNKS):
        master, exp_avg, exp_avg_sq = (torch.rand(CHUNK) for _ in range(3))
        scratch = next(buffers)
        made.append((master, exp_avg, exp_avg_sq, scratch, torch.rand(CHUNK).bfloat16(), master.bfloat16()))
    return made


def ours(state: State) -> None:
    """The arithmetic that ``ChunkUpdate.compute`` does with a chunk in a staging buffer."""
    master, exp_avg, exp_avg_sq, scratch, gradient, copy = state
    each = adam.part_elements()
    for start in range(0, CHUNK, each):
        part = slice(start, start + each)
        wide = scratch[: min(each, CHUNK - start)].copy_(gradient[part])
        adam.update(OPTIONS, 3, master[part], wide, exp_avg[part], exp_avg_sq[part])
        copy[part].copy_(master[part])


def torch_fused() -> Callable[[State], None]:
    optimizers: dict[int, torch.optim.AdamW] = {}

    def update(state: State) -> None:
        master, exp_avg, exp_avg_sq, _, gradient, copy = state
        optimizer = optimizers.get(id(state))
        if optimizer is None:
            optimizer = torch.optim.AdamW([master], lr=OPTIONS.lr, fused=True)
            optimizer.state[master] = {"step": torch.tensor(3.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            optimizers[id(state)] = optimizer
        master.grad = gradient.float()
        optimizer.step()
        copy.copy_(master)

    return update


def deepspeed() -> Callable[[State], None] | None:
    """DeepSpeed's CPUAdam, or None where it is not installed."""
    try:
        made: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    except ImportError:
        return None
    optimizers: dict[int, Any] = {}

    def update(state: State) -> None:
        master, _, _, _, gradient, copy = state
        if id(state) not in optimizers:
            optimizers[id(state)] = made([torch.nn.Parameter(master)], lr=OPTIONS.lr)
        optimizer = optimizers[id(state)]
        optimizer.param_groups[0]["params"][0].grad = gradient.float()
        optimizer.step()
        copy.copy_(master)

    return update


def copying() -> Callable[[State], None]:
    """As many bytes as an update touches, half of them read and half written."""
    half = BYTES_PER_PARAMETER * CHUNK // 2
    buffers = itertools.cycle([torch.ones(half, dtype=torch.uint8) for _ in range(CHUNKS)])
    following = itertools.cycle([torch.ones(half, dtype=torch.uint8) for _ in range(CHUNKS)])

    def copy(state: State) -> None:
        next(buffers).copy_(next(following))

    return copy


def seconds_of(update: Callable[[State], None], all_states: Sequence[State]) -> float:
    begin_s = time.perf_counter()
    for state in all_states:
        update(state)
    return time.perf_counter() - begin_s


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=at_least_one, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    made = states()
    runs: dict[str, Callable[[State], None]] = {"ours": ours, "copy": copying(), "torch_fused": torch_fused()}
    theirs = deepspeed()
    if theirs is not None:
        runs["deepspeed"] = theirs
    with torch.no_grad():
        for update in runs.values():
            seconds_of(update, made)
        rounds = [{name: seconds_of(update, made) for name, update in runs.items()} for _ in range(args.rounds)]
    parameters = CHUNK * CHUNKS
    rates = {name: parameters / statistics.median(found[name] for found in rounds) for name in runs}
    ratios = {
        f"ratio_to_{name}": statistics.median(found[name] / found["ours"] for found in rounds) if name in runs else None
        for name in ("copy", "torch_fused", "deepspeed")
    }
    rows = [
        (name, f"{rate / 1e6:.0f}M parameters/s, {rate * BYTES_PER_PARAMETER / 1e9:.1f} GB/s")
        for name, rate in rates.items()
    ]
    rows += [(name, "not installed" if ratio is None else f"{ratio:.3f}") for name, ratio in ratios.items()]
    missed = [
        f"{name} {ratio:.3f}, at least {LEAST[name]} wanted"
        for name, ratio in ratios.items()
        if ratio is not None and ratio < LEAST[name]
    ]
    finish(
        "adam",
        rows,
        {**ratios, "parameters_per_s": rates, "threads": args.threads, "rounds": rounds},
        missed,
        save=args.save,
    )


if __name__ == "__main__":
    main()
