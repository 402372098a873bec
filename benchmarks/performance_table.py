"""performance_table: docs/performance.md from the results that the benchmarks of speed and memory saved.

    python benchmarks/performance_table.py --write

The last part, what was tried and did not help, is written by hand in ``benchmarks/tried.md``.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import bars
from peer_traffic import traffic
from results_table import NOT_MEASURED, RESULTS, Figures, Row, finish, load, machines, number, scalars, table

COMMAND = "python benchmarks/performance_table.py --write"
TRIED = Path(__file__).parent / "tried.md"


def _io(found: Figures) -> str:
    told: dict[tuple[int, int], list[str]] = {}
    for row in found["rows"]:
        told.setdefault((row["directories"], row["chunk_elements"]), []).append(
            f"{row['kind']} {number(row['ratio'])}x"
        )
    names = {1: "one directory", 2: "two directories of one drive"}
    return "; ".join(
        f"{names[count]}, chunks of {chunk:,}: {', '.join(ratios)}" for (count, chunk), ratios in told.items()
    )


def _adam(found: Figures) -> str:
    pairs = (
        ("copies", "ratio_to_copy"),
        ("torch's fused", "ratio_to_torch_fused"),
        ("DeepSpeed", "ratio_to_deepspeed"),
    )
    ratios = ", ".join(f"{number(found.get(key))}x {name}" for name, key in pairs)
    return (
        f"{ratios}, each by {found['threads']} threads, without checksums (where the CPU computes, a training updates by one "
        "thread, docs/0020, which finds checksums too if checkpoints are kept, docs/0040)"
    )


def _overlap(found: Figures) -> str:
    cases = found.get("cases", [found])
    return "; ".join(
        f"{case['ratio']:.2f}x the busiest lane ({case['busiest_lane']}) at {case['size']} {case['batch']} x {case['seq']}, "
        f"{case['serial_s'] / case['overlapped_s']:.2f}x faster than one lane after the other{_beside_fio(case)}"
        for case in cases
    )


def _beside_fio(case: Figures) -> str:
    seconds = case.get("compute_beside_fio_s")
    if not seconds:
        return ""
    ratio = seconds / case["lanes"]["compute+cpu"]
    return f" (compute alone, while fio moves {case['fio_moved_share']:.0%} as much: {ratio:.2f}x)"


def _clipping(found: Figures) -> str:
    return "; ".join(
        f"{case['ratio']:.2f}x at {case['size']} {case['batch']} x {case['seq']} ({_expected(case, 'without')} without, "
        f"{_expected(case, 'with')} with)"
        for case in found.get("cases", [found])
    )


def _expected(case: Figures, name: str) -> str:
    """Seconds of a step, with what was expected of it where that was saved."""
    expected = case.get("expected", {}).get(name)
    more = f", predicted {expected['predicted_s']:.2f}, simulated {expected['simulated_s']:.2f}," if expected else ""
    return f"{case[f'{name}_s']:.2f} s{more}"


def _segments(found: Figures) -> str:
    cases = [case for case in found["cases"] if case["prepared"]["compiled"]["segments"]]
    ratios = ", ".join(f"{case['ratio']:.3f}x at {case['case']}" for case in cases)
    return f"{ratios}; geometric mean {statistics.geometric_mean(case['ratio'] for case in cases):.3f}x"


def _compile_time(found: Figures) -> str:
    return (
        f"{found['ratio']:.2f}x, the median of rounds ({found['ours_s']:.1f} s and {found['aot_eager_s']:.1f} s, medians), "
        f"{found['layers']} layers"
    )


def _plan_time(found: Figures) -> str:
    depths = ", ".join(f"{depth['layers']} layers {depth['wall_s']:.1f} s" for depth in found["depths"])
    return (
        f"{found['wall_s']:.1f} s, {found['processor_s']:.1f} s of the processor, {found['peak_rss_bytes'] / 1e9:.2f} GB; "
        f"by depth, as wide: {depths}"
    )


def _peers(found: Figures) -> str:
    return "; ".join(_peer_case(case) for case in found["cases"])


def _peer_case(case: Figures) -> str:
    ratios = ", ".join(f"{number(ratio)}x {name}" for name, ratio in case["ratios"].items())
    config = case["config"]
    name = " ".join(map(str, config.values())) if isinstance(config, dict) else str(config)
    peaks = ", ".join(
        f"{system} {figures['peak_rss_bytes'] / 1e9:.1f} GB" for system, figures in case["systems"].items()
    )
    ours = traffic(case["systems"]["lohan_fx"]["rounds"][-1])
    return f"{name}: {ratios} (peak RSS: {peaks}; lohan_fx: {ours})"


def _generality(found: Figures) -> str:
    from_eager = max(abs(ours - plain) for ours, plain in zip(found["losses"], found["plain_losses"], strict=True))
    return (
        f"{found['ratio']:.3f}x plain PyTorch's step; losses {found['loss_difference']:g} apart from aot_eager's, at most "
        f"{from_eager:.2g} from eager's in {len(found['losses'])} steps (bf16)"
    )


def _lengths(found: Figures) -> str:
    cases = {case["case"]: case for case in found["cases"]}
    each = ", ".join(
        f"{name} {case['seconds']:.0f} s with {case['captures']} captures, peak RSS {case['peak_rss_bytes'] / 1e9:.2f} of "
        f"{case['promised_rss_bytes'] / 1e9:.2f} GB"
        for name, case in cases.items()
    )
    said = f"{found['steps']} batches of 16 to 128 tokens x {found['batch']}, {found['size']}, {found['host_memory']}"
    return f"{said}: {found['each_over_many']:.2f}x as fast as with graphs for each shape ({each}); the same losses"


def _prediction(found: Figures) -> str:
    errors = [abs(case["error"]) for case in found["cases"]]
    return (
        f"within 10 % in {sum(error <= 0.1 for error in errors)} of {len(errors)} cases, the median {_median(errors)}, the "
        f"worst {max(errors):.0%} off; bytes exact in {sum(bool(case['bytes_exact']) for case in found['cases'])}"
    )


def _median(errors: list[float]) -> str:
    return f"{statistics.median(errors):.0%}"


def _better(found: Figures) -> str:
    return "; ".join(f"{case['case']}: {case['ratio']:.3f}x the best ({case['best']})" for case in found["cases"])


def _sizes(found: Figures) -> str:
    return "; ".join(
        f"{case['case']}: {case['ratio']:.3f}x the best ({', '.join(_size(one) for one in case['sizes'].values())})"
        for case in found["cases"]
    )


def _size(found: Figures) -> str:
    return (
        f"{found['io_bytes'] / 2**20:g} MiB {number(found['measured_s'])} s, predicted {number(found['predicted_s'])}"
    )


def _paced(found: Figures) -> str:
    errors = [abs(case["simulated_s"] / case["measured_s"] - 1) for case in found["cases"]]
    return f"median {_median(errors)}, worst {max(errors):.0%} off in {len(errors)} cases"


def _memory(found: Figures) -> str:
    return (
        f"{found['params'] / 1e9:.2f}e9 parameters, {found['s_per_step']:.1f} s a step, peak RSS "
        f"{found['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def _papers(found: Figures) -> str:
    return (
        f"{found['within_10_percent']} of {found['claims']} claims within 10 %, "
        f"{found['throughput_numbers_within_5_percent']} of {found['throughput_numbers']} numbers of throughput within 5 %, "
        f"{found['yes_or_no_right']} of {found['yes_or_no']} yes or no right"
    )


ROWS = (
    Row("io", "Throughput of the store over fio's", ">= 0.95", _io, missed=bars.io),
    Row("adam", "Bandwidth of the optimizer's update", ">= 0.85 copies, 1.0 torch, 1.3 DeepSpeed", _adam),
    Row("overlap", "Step time over the busiest lane's own work", "<= 1.10", _overlap),
    Row(
        "segments",
        "Graph segments compiled by Inductor over boxed ones",
        "the faster is the default",
        _segments,
        missed=bars.segments,
    ),
    Row("compile_time", "Capture and passes over `aot_eager`'s compile time", "<= 1.5", _compile_time),
    Row("plan_time", "175B planned on 2 cores", "< 180 s and 8 GB; 8x the layers <= 4x the seconds", _plan_time),
    Row("peers", "Tokens per second over the peers'", "see benchmarks/README.md", _peers),
    Row("peers_gpu", "The same with a GPU, within the peers' GPU memory", "see benchmarks/README.md", _peers),
    Row("scale", "Cost per parameter, 134M to 3B; memory over depth", "flat", scalars),
    Row("clipping", "Step time with global-norm clipping over without", "<= 1.10", _clipping),
    Row("generality", "A model that fits, over plain PyTorch", "<= 1.1", _generality),
    Row("many_lengths", "Batches of many lengths: graphs for many sizes", "within the promise", _lengths),
    Row("larger_than_memory", "States many times the memory", "peak RSS < 5 GB", _memory),
    Row("larger_than_memory_3b", "The same with 3B, built on `meta`", "peak RSS < 6 GB", _memory),
    Row("prediction", "Step time predicted", "10 % in 10 of 12, none beyond 20 %", _prediction),
    Row("prediction_gpu", "The same with a GPU", "10 % in 10 of 12, none beyond 20 %", _prediction),
    Row("better", "The searched plan over the best of all policies and random plans", "<= 1.03", _better),
    Row("request_sizes", "Requests as large as the search chooses over the best size", "<= 1.03", _sizes),
    Row("paced_lanes", "Step time simulated, where all rates are known", "15 %", _paced),
    Row("paper_tables", "The papers' claims, computed", "80 %; throughput 5 %; yes or no right", _papers),
)

TEXT = """# Performance, measured

Made by `{command}` from `benchmarks/results/` and `benchmarks/tried.md`; do not edit. Each figure is what its command
printed on its date; *not measured* is a benchmark whose result has not been saved yet.

{table}

Measured on:

{machines}

## Predicted beside measured

{predicted}

{tried}"""


def predicted(results: Path = RESULTS) -> str:
    """Every case of which both are known."""
    lines = [
        "| case | predicted | simulated | measured | off | peak RSS predicted | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("prediction", "prediction_gpu"):
        found = load(name, results)
        for case in found["cases"] if found else ():
            lines.append(_line(case["case"], case, case.get("simulated_s")))
    if (memory := load("larger_than_memory", results)) is not None:
        case = {"predicted_s": memory["predicted_s_per_step"], "measured_s": memory["s_per_step"], **memory}
        lines.append(_line(f"{memory['size']} {memory['batch']}x{memory['seq']}", case, None))
    return "\n".join(lines) if len(lines) > 2 else NOT_MEASURED


def _line(name: str, case: Figures, simulated_s: Any) -> str:
    off = case["predicted_s"] / case["measured_s"] - 1
    memory = [f"{case[key] / 1e9:.2f} GB" for key in ("predicted_peak_rss_bytes", "peak_rss_bytes")]
    seconds = [f"{number(value)}{'' if value is None else ' s'}" for value in (case["predicted_s"], simulated_s)]
    cells = [name, *seconds, f"{case['measured_s']:.3g} s", f"{off:+.0%}", *memory]
    return "| " + " | ".join(cells) + " |"


def page(results: Path = RESULTS) -> str:
    """All of docs/performance.md."""
    return TEXT.format(
        command=COMMAND,
        table=table(ROWS, results),
        machines=machines(ROWS, results),
        predicted=predicted(results),
        tried=TRIED.read_text(),
    )


if __name__ == "__main__":
    finish("performance.md", page(), __doc__.splitlines()[0] if __doc__ else "")
