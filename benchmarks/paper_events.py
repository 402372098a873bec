"""paper_events: the papers' pipelines played event by event on simulated lanes: fill and drain included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan_fx.simulation.event_clock import Clock, Job, SimulatedLane, Thread


@dataclass(frozen=True)
class Task:
    """Joins its lane's queue when the tasks named in ``after`` are done.

    A lane serves one at a time: the lowest ``priority`` first, then in order of joining.
    """

    name: str
    lane: str
    seconds: float
    after: tuple[str, ...] = ()
    priority: int = 0


def play(tasks: Sequence[Task]) -> dict[str, float]:
    """Name -> the moment at which the task is done."""
    clock = Clock(lambda jobs: [1.0] * len(jobs))
    lanes = {task.lane: SimulatedLane(clock) for task in tasks}
    done = {task.name: clock.signal() for task in tasks}
    ends: dict[str, float] = {}

    def run(task: Task) -> Thread:
        yield Job(task.lane, task.name, task.seconds)
        ends[task.name] = clock.now_s
        done[task.name].set()

    def join(task: Task) -> Thread:
        for name in task.after:
            yield done[name]
        lanes[task.lane].submit(run(task), priority=task.priority)

    for task in tasks:
        clock.start(join(task))
    clock.run()
    missing = [task.name for task in tasks if task.name not in ends]
    assert not missing, f"these wait for each other: {', '.join(missing[:5])}"
    return ends


@dataclass(frozen=True)
class BlockSeconds:
    """Of one block (one tensor of the papers' handlers), all blocks alike.

    ``fetch``: its parameters and activations from the drives; ``load``: the same to the GPU; ``backward``;
    ``gradient``: to main memory; ``read``, ``update``, ``write``: of its states.
    """

    fetch: float
    load: float
    backward: float
    gradient: float
    read: float
    update: float
    write: float


SLOTS = 3
"""Blocks whose states, or whose parameters and activations, are in main memory at once (mechanisms B3: 2, 3 for slack)."""


def backward_tasks(block: BlockSeconds, blocks: int, order: str) -> list[Task]:
    """A backward with the optimizer inside, the last block first (LoHan sec. IV-C, Fuyou sec. 4.3).

    ``order``: "naive" (read, update and write one after the other from each gradient's arrival), "optimized" (the
    write of i joins after the read of i-1) or "delayed" (it joins after the update of i-1). What the GPU waits for goes
    before states (c3.11).
    """
    tasks: list[Task] = []
    for i in reversed(range(blocks)):
        above = i + 1 < blocks
        full = i + SLOTS < blocks
        window = (f"backward{i + SLOTS}",) if full else ()
        tasks += [
            Task(f"fetch{i}", "ssd", block.fetch, window),
            Task(f"load{i}", "h2d", block.load, (f"fetch{i}",)),
            Task(f"backward{i}", "compute", block.backward, (f"load{i}", *([f"backward{i + 1}"] if above else []))),
            Task(f"gradient{i}", "d2h", block.gradient, (f"backward{i}",)),
        ]
        if order == "naive":
            may_read = (f"gradient{i}", *([f"write{i + 1}"] if above else []))
            may_write: tuple[str, ...] = (f"update{i}",)
        else:
            may_read = (*window, *([f"write{i + SLOTS}"] if full else []))
            follows = "read" if order == "optimized" else "update"
            may_write = (f"update{i}", *([f"{follows}{i - 1}"] if i else []))
        tasks += [
            Task(f"read{i}", "ssd", block.read, may_read, priority=1),
            Task(f"update{i}", "cpu", block.update, (f"read{i}", f"gradient{i}")),
            Task(f"write{i}", "ssd", block.write, may_write, priority=1),
        ]
    return tasks


def chain_tasks(stages: Sequence[tuple[str, float]], blocks: int) -> list[Task]:
    """Blocks one after the other, and within each one lane after the other: Fuyou's fig. 2a of ZeRO-Infinity."""
    tasks: list[Task] = []
    for i in range(blocks):
        for lane, seconds in stages:
            before = (tasks[-1].name,) if tasks else ()
            tasks.append(Task(f"{lane}{i}", lane, seconds, before))
    return tasks


@dataclass(frozen=True)
class LspLayer:
    """Seconds of one layer in LSP-Offload's schedule."""

    forward: float
    backward: float
    down: float
    update: float
    up: float


def lsp_tasks(layer: LspLayer, layers: int, transition: int, steps: int) -> list[Task]:
    """LSP-Offload's layer-wise schedule (Alg. 3) over several steps; the forward of a layer waits for its update.

    Layers above ``transition`` are served first come, first served, the others last come, first served.
    """
    tasks: list[Task] = []
    for step in range(steps):
        for i in range(layers):
            before = f"forward{step}.{i - 1}" if i else f"backward{step - 1}.0"
            ready = (*([before] if i or step else []), *([f"up{step - 1}.{i}"] if step else []))
            tasks.append(Task(f"forward{step}.{i}", "gpu", layer.forward, ready))
        for i in reversed(range(layers)):
            before = f"backward{step}.{i + 1}" if i + 1 < layers else f"forward{step}.{i}"
            tasks.append(Task(f"backward{step}.{i}", "gpu", layer.backward, (before,)))
            # Below the transition a shallower layer, which came later, goes before all that wait.
            rank = layers if i > transition else i
            last = f"backward{step}.{i}"
            for lane, seconds in (("down", layer.down), ("update", layer.update), ("up", layer.up)):
                tasks.append(Task(f"{lane}{step}.{i}", lane, seconds, (last,), rank))
                last = f"{lane}{step}.{i}"
    return tasks
