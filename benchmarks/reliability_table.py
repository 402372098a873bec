"""reliability_table: docs/reliability.md from the results that the benchmarks of safety saved.

python benchmarks/reliability_table.py --write
"""

from __future__ import annotations

from pathlib import Path

import bars
from results_table import RESULTS, Figures, Row, finish, machines, scalars, table

COMMAND = "python benchmarks/reliability_table.py --write"


def _kills(found: Figures) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    struck = ", ".join(f"{count} in {phase}" for phase, count in found["struck"].items())
    recipes = ", ".join(f"{count} of one that {name}" for name, count in found["recipes"].items())
    equal = "all bits equal" if found["bit_equal"] else "BITS DIFFER"
    return f"{found['kills']} kills ({kinds}; {struck}; {recipes}) in {found['trainings']} trainings: {equal}"


def _interrupts(found: Figures) -> str:
    struck = ", ".join(f"{count} in {phase}" for phase, count in found["struck"].items())
    equal = "all bits equal" if found["bit_equal"] else "BITS DIFFER"
    return (
        f"{found['interrupts']} interrupts ({struck}): the slowest ended in {found['slowest_s']:.1f} s, "
        f"{found['locks_held']} kept their lock, {equal}"
        + (f"; {found['aborted']} ended by PyTorch's abort" if found.get("aborted") else "")
    )


def _faults(found: Figures) -> str:
    return (
        f"{found['injected']} injected: {found['surfaced']} surfaced and the training resumed to equal bits, "
        f"{found['retried']} changed nothing, {found['silent']} silent"
    )


def _fuzz(found: Figures) -> str:
    trainings = found.get("training")
    taken = f" (of trainings {trainings['accepted']:,}, taken up and exported)" if trainings else ""
    return (
        f"{found['mutated']:,} mutated: {found['refused']:,} refused, {found['accepted']:,} accepted and inside the "
        f"files{taken}, {found['wrong']} wrong"
    )


def _commit(found: Figures) -> str:
    cases = "; ".join(
        f"{case['parameters'] / 1e6:,.0f}M parameters: {1e3 * case['commit_s']:.1f} ms, of which {1e3 * case['sync_s']:.1f} "
        f"ms syncing, beside {case['step_s']:.2f} s a step ({case['share']:.2%} without syncing)"
        for case in found["cases"]
    )
    return cases


def _commit_in_memory(found: Figures) -> str:
    return (
        f"{found['bytes'] / 1e9:.2f} GB of states in {found['commit_s']:.2f} s, {found['ratio']:.2f} times as long as raw writes "
        "of as much"
    )


def _checksums(found: Figures) -> str:
    return (
        f"{found['processor_share']:.1%} of a step's processor time, {found['step_ratio'] - 1:+.1%} of its seconds "
        f"({found['gigabytes_per_step']:.2f} GB summed per step); raw I/O {found['raw_ratio'] - 1:+.1%}"
    )


def _memory(found: Figures) -> str:
    return (
        f"{found['params'] / 1e9:.2f}e9 parameters: grew by {found['growth_bytes'] / 1e9:.2f} GB at most, "
        f"{found['promise_bytes'] / 1e9:.2f} promised; peak RSS {found['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def _least(found: Figures) -> str:
    return "; ".join(
        f"{case['case']}: {case['most_bytes'] / 1e6:,.0f} of {case['promise_bytes'] / 1e6:,.0f} MB"
        + "".join(f" ({what}: refused)" for what in case["refused"])
        for case in found["cases"]
    )


def _growth(found: Figures) -> str:
    return f"{found['growth_bytes'] / 1e6:.1f} MB over {found['steps']} steps"


def _bytes(found: Figures) -> str:
    exact = sum(bool(case["bytes_exact"]) for case in found["cases"])
    return f"exact in {exact} of {len(found['cases'])} cases"


def _families(found: Figures) -> str:
    return (
        f"{found['families']} of {found['of_families']} families: {found['as_eager']} bit-equal to eager PyTorch, "
        f"{found['as_aot_eager']} to `aot_eager`, which differs from eager as much; refused: {found['not_traceable']} that "
        f"`torch.compile` cannot trace either, {found['sizes_depend_on_values']} with sizes that depend on values"
    )


def _generates(found: Figures) -> str:
    return (
        f"{found['families']} of {found['of_families']} families, each with a cache and without: {found['same']} of "
        f"{len(found['cases'])} say the same words; refused: {found['not_traceable']} that `torch.compile` cannot trace either, "
        f"{found['sizes_depend_on_values']} with sizes that depend on values, {found['edits_parameters']} that edit their "
        f"parameters; {found['not_eager']} where plain PyTorch fails"
    )


ROWS = (
    Row("families", "Models of Hugging Face's families train to plain PyTorch's numbers", "every bit", _families),
    Row(
        "families_lengths",
        "The same, text in batches of four lengths, whose graphs hold for many sizes",
        "every bit",
        _families,
    ),
    Row("generates", "Those that make text generate what plain PyTorch does", "every word", _generates),
    Row("kill9", "Killed at any moment, also by power losses, a training ends with the same bits", "100 %", _kills),
    Row("kill9_gpu", "The same, computing on a GPU", "100 %", _kills),
    Row("interrupts", "Ctrl-C ends it soon, cleanly, and the next run goes on", "5 s, equal bits", _interrupts),
    Row("faults", "A fault of the drive surfaces, or changes nothing (2 checkpoints kept)", "0 silent", _faults),
    Row("faults_keep1", "The same with 1 checkpoint kept, read back (`verify=True`)", "0 silent", _faults),
    Row("fuzz_manifests", "No manifest leads out of the files, or breaks what reads it", "0 wrong", _fuzz),
    Row(
        "commit",
        "A commit is a moment beside a step, also for a larger model (states on NVMe)",
        "< 1 % of a step, and syncing",
        _commit,
    ),
    Row("commit_in_memory", "States that the plan keeps in memory are written by a commit", "", _commit_in_memory),
    Row("checksums", "Checksums of all that is written and read", "< 3 %", _checksums, missed=bars.checksums),
    Row("larger_than_memory", "Memory stays below the promise", "as promised", _memory),
    Row("larger_than_memory_3b", "The same, built on `meta`: also while weights are made", "as promised", _memory),
    Row("within_promise", "The same under a limit of the kernel", "as promised", scalars),
    Row("least_promise", "The same with the least promise that a refusal names", "as promised", _least),
    Row("rss_growth", "Memory does not grow", "no growth beyond noise", _growth),
    Row("prediction", "Bytes written are those of the plan", "exact", _bytes, judged=False),
)

TEXT = """# Reliability, measured

Made by `{command}` from `benchmarks/results/`; do not edit. Each figure is what its command printed on its date.

{table}

Measured on:

{machines}

## What is promised, and against what

- *A killed process, or a power loss*: one checkpoint (the default) is enough. What was not committed is as if it had never
  been written.
- *A drive that stores other bits than it was given, and says nothing*: the checksum of every chunk is compared whenever
  the chunk is read, so no training goes on with them. But the read may come a step after the commit, when the checkpoint
  before is gone. Keep two (`checkpoint(keep=2)`), and go back by one (`lohan-fx fsck` says which is whole); or read back
  what is new before it counts (`checkpoint(verify=True)`), which takes a read of all states and no more disk. The manifest
  is always read back before it replaces the one before; an older one that is damaged costs only itself.
- *A drive that fails* (EIO, no space, short counts): one error that names file, place and remedy; the last checkpoint holds.
- *A drive that does not answer*: a timeout that names what was waited for, what each lane ran and had queued, and where
  every thread was. Ctrl-C does not wait for it.
- *Not covered*: somebody who forges checksums, damage in RAM, and both checkpoints of two damaged by one drive. Without
  `checkpoints=` and before the first checkpoint nothing is summed. `max_bytes_written` does not know what a killed process
  wrote after its last checkpoint.
"""


def page(results: Path = RESULTS) -> str:
    """All of docs/reliability.md."""
    return TEXT.format(command=COMMAND, table=table(ROWS, results), machines=machines(ROWS, results))


if __name__ == "__main__":
    finish("reliability.md", page(), __doc__.splitlines()[0] if __doc__ else "")
