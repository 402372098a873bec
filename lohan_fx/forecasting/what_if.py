"""what_if: several forecasts side by side: other policies, other machines, other batches, other models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.forecasting.forecast import Asked, Forecast, Subject, forecast, notes_on
from lohan_fx.forecasting.forecast_table import forecast_data, format_rate
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.model_source import UserCodeError
from lohan_fx.planning.budgets import parse_bytes
from lohan_fx.policies import POLICIES, named
from lohan_fx.presets import PRESETS
from lohan_fx.reporting.plan_table import table
from lohan_fx.units import format_bytes, format_seconds

MOST_BATCHES = 4096
MOST_VALUES = 64
MOST = 1 << 24
"""More samples, or tokens in one, are a slip of the keyboard."""
MOST_DRIVES = 1024
GAIN = 1.01
"""A doubled batch must give this much more throughput to be worth another try."""
FINEST = 0.05
"""Share of the best batch by which the next one that was tried, and does not fit, may be larger."""

SubjectOf = Callable[[int | None, int | None, str], Subject]
"""The model captured at a batch and a sequence, None for what was asked for, as a device ("cpu" or "cuda") runs it."""

_GPU_FIELDS = ("device", "device_name", "matmul_flops_per_s", "memory_bytes_per_s", "device_memory_bytes")


@dataclass(frozen=True)
class Row:
    """One case: its forecast, or why there is none. ``is_bad_input``: not for want of memory, but because the case cannot
    be asked for."""

    label: str
    found: Forecast | None
    why_not: str = ""
    is_bad_input: bool = False


def attempt(label: str, make: Callable[[], Forecast]) -> Row:
    """The forecast that ``make`` gives, or the first line of why there is none. What the user's own code raises is raised."""
    try:
        return Row(label, make())
    except UserCodeError:
        raise
    except (InfeasiblePlan, ValueError) as error:
        return Row(label, None, str(error).splitlines()[0], isinstance(error, ValueError))


# --- what is varied -------------------------------------------------------------------------------------------


def compare(subject_of: SubjectOf, asked: Asked, policies: str) -> list[Row]:
    """A row per policy in ``policies`` (names with commas, or "all"), the fastest first."""
    names = list(POLICIES) if policies == "all" else [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--compare is {policies!r}: expected policies with commas between, or 'all'")
    for name in names:
        named(name)
    cases = [(name, dataclasses.replace(asked, policy=name)) for name in dict.fromkeys(names)]
    subject = subject_of(None, None, asked.hw.device)
    rows = [attempt(name, functools.partial(forecast, subject, case)) for name, case in cases]
    return sorted(rows, key=lambda row: row.found.expected_s if row.found else float("inf"))


def vary(subject_of: SubjectOf, asked: Asked, spec: str) -> list[Row]:
    """A row per value of ``spec``, such as ``ssds=1..12``, ``host_memory=128GiB,256GiB``, ``gpu=rtx4090,a100``."""
    name = varied(spec)
    values = _values(name, spec.partition("=")[2])
    if name in ("batch", "seq"):
        shapes = [(value, None) if name == "batch" else (None, value) for value in values]
        makes = [functools.partial(_at_shape, subject_of, shape, asked) for shape in shapes]
        return [attempt(str(value), make) for value, make in zip(values, makes, strict=True)]
    cases = [(_label(name, value), _changed(asked, name, value)) for value in values]
    made = [(label, functools.partial(forecast, subject_of(None, None, case.hw.device), case)) for label, case in cases]
    return [attempt(label, make) for label, make in made]


def _at_shape(subject_of: SubjectOf, shape: tuple[int | None, int | None], asked: Asked) -> Forecast:
    return forecast(subject_of(*shape, asked.hw.device), asked)


def varied(spec: str) -> str:
    """What ``spec`` varies; ``ValueError`` where that is nothing known."""
    name, equals, _ = spec.partition("=")
    name = name.strip().replace("-", "_")
    if name not in VARIED or not equals:
        raise ValueError(
            f"--vary is {spec!r}: expected one of {', '.join(VARIED)}, then = and values such as 1..12 or 1,2,4"
        )
    return name


VARIED = ("ssds", "host_memory", "device_memory", "gpu", "batch", "seq")


def _values(name: str, text: str) -> list[Any]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        empty = "has an empty value" if any(parts) else "is over nothing"
        raise ValueError(f"--vary {name}={text} {empty}: expected values such as 1..12 or 1,2,4")
    values = [value for part in parts for value in _part(name, part)]
    if len(values) > MOST_VALUES:
        raise ValueError(f"--vary {name}={text} is over {len(values)} values: expected at most {MOST_VALUES}")
    return list(dict.fromkeys(values))


def _part(name: str, part: str) -> Iterator[Any]:
    """The values of ``1..12`` (each number of drives; of others each doubling, and the end), or of a single value."""
    first, dots, last = part.partition("..")
    if name == "gpu":
        yield part
    elif not dots:
        yield _value(name, part)
    else:
        low, high = _value(name, first), _value(name, last)
        if low > high:
            raise ValueError(f"--vary {name}={part} is over nothing: expected the smaller one first, {last}..{first}")
        if name == "ssds":
            if high - low >= MOST_VALUES:
                raise ValueError(
                    f"--vary {name}={part} is over {high - low + 1} values: expected at most {MOST_VALUES}"
                )
            yield from range(low, high + 1)
        else:
            while low < high:
                yield low
                low *= 2
            yield high


def _value(name: str, text: str) -> int:
    if name.endswith("memory"):
        return parse_bytes(text, f"--vary {name}")
    most = MOST_DRIVES if name == "ssds" else MOST
    if not text.strip().isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"--vary {name} is {text!r}: expected a whole number from 1 to {most:,}, as in 1..12 or 1,2,4")
    return int(text)


def _label(name: str, value: Any) -> str:
    return format_bytes(value) if name.endswith("memory") else f"{value}"


def _changed(asked: Asked, name: str, value: Any) -> Asked:
    hw = asked.hw
    if name == "ssds":
        if not hw.nvme:
            raise ValueError(f"--vary ssds: the hardware profile {hw.name!r} has no drive to take more of")
        drives = (hw.nvme + hw.nvme[:1] * value)[:value]
        return dataclasses.replace(asked, hw=dataclasses.replace(hw, name=f"{hw.name}, {value} drives", nvme=drives))
    if name == "host_memory":
        return dataclasses.replace(asked, host_memory_bytes=value)
    if name == "device_memory":
        return dataclasses.replace(asked, device_memory_bytes=value)
    link = (
        f"the rates between host and device are those of {hw.name!r}, a CPU's, which are of copies within its memory: a GPU's "
        "link may be slower"
    )
    return dataclasses.replace(asked, hw=_with_gpu(hw, value), notes=(link,) if hw.device == "cpu" else ())


def _with_gpu(hw: HardwareProfile, gpu: str) -> HardwareProfile:
    """``hw`` with the GPU of the first preset that is called, or whose name begins with the word, ``gpu``."""
    donors = [preset for name, preset in PRESETS.items() if gpu.lower() in (name.lower(), name.split("-")[0])]
    if not donors:
        known = ", ".join(dict.fromkeys(name.split("-")[0] for name in PRESETS))
        raise ValueError(f"--vary gpu: no GPU {gpu!r} among the presets: there are {known}")
    prices = hw.prices
    if prices is not None:
        theirs = donors[0].prices
        prices = None if theirs is None else dataclasses.replace(prices, gpu_usd=theirs.gpu_usd)
    changes = {field: getattr(donors[0], field) for field in _GPU_FIELDS}
    return dataclasses.replace(hw, name=f"{hw.name} with {donors[0].device_name}", prices=prices, machine="", **changes)


# --- what is searched -----------------------------------------------------------------------------------------


def best_batch(subject_of: SubjectOf, asked: Asked) -> list[Row]:
    """Rows for growing batches; the fastest per token is the one with the most throughput.

    Doubles while that gains, then looks at what lies half-way to the best one's neighbours, and, as long as the next larger
    one does not fit, half-way to that, until they are less than ``FINEST`` apart.
    """

    def row(batch: int) -> Row:
        return attempt(str(batch), functools.partial(_at_shape, subject_of, (batch, None), asked))

    found: dict[int, Row] = {}
    batch, best = 1, 0.0
    while batch <= MOST_BATCHES:
        try:
            found[batch] = row(batch)
        except UserCodeError:
            raise
        except Exception as error:
            # BatchNorm trains on no single sample; whatever else is wrong is wrong with two, too.
            if batch > 1:
                raise
            found[batch] = Row(str(batch), None, f"{type(error).__name__}: {error}".splitlines()[0], is_bad_input=True)
            batch = 2
            continue
        rate = _rate(found[batch])
        if rate <= best * GAIN:
            break
        best, batch = max(best, rate), 2 * batch
    top = max(found, key=lambda b: _rate(found[b]))
    for between in (top * 3 // 4, top * 3 // 2):
        if between not in found and between > 0:
            found[between] = row(between)
    while (closer := _below_the_limit(found)) is not None:
        found[closer] = row(closer)
    return [found[batch] for batch in sorted(found)]


def _below_the_limit(found: Mapping[int, Row]) -> int | None:
    """The batch half-way from the best one to the next larger one, where that does not fit and is not close."""
    top = max(found, key=lambda b: _rate(found[b]))
    above = min((b for b in found if b > top), default=top)
    if found[above].found is not None or above - top <= max(1, FINEST * top):
        return None
    return (top + above) // 2


def _rate(row: Row) -> float:
    return row.found.units_per_s if row.found else 0.0


def max_model(subjects: Sequence[tuple[str, Callable[[], Subject]]], asked: Asked) -> list[Row]:
    """Rows of the models looked at by bisection, smallest first; ``subjects`` must be in order of size."""
    rows: dict[int, Row] = {}
    low, high = -1, len(subjects)
    while high - low > 1:
        middle = (low + high) // 2
        name, make = subjects[middle]
        rows[middle] = attempt(name, functools.partial(_made, make, asked))
        low, high = (middle, high) if rows[middle].found else (low, middle)
    return [rows[place] for place in sorted(rows)]


def _made(make: Callable[[], Subject], asked: Asked) -> Forecast:
    return forecast(make(), asked)


def best(rows: Iterable[Row]) -> Row | None:
    """The row with the most throughput."""
    return max((row for row in rows if row.found), key=_rate, default=None)


# --- as text and data -----------------------------------------------------------------------------------------


def rows_text(title: str, rows: Sequence[Row], *, width: int = 0) -> str:
    """A table of ``rows``, in several parts where it is wider than ``width`` characters (0: however wide); those without a
    forecast say why below it, and then come the notes on what was asked."""
    lines = []
    for row in rows:
        found = row.found
        if found is None:
            lines.append([f"  {row.label}", "no", *["-"] * 9])
            continue
        simulated = format_seconds(found.simulation.step_s) if found.simulation else "-"
        cost = "-" if found.usd_per_million is None else f"{found.usd_per_million:,.3g}"
        wear = "-" if found.wear_years is None else f"{found.wear_years:,.1f}"
        binds = "/".join(stage.bottleneck for stage in found.stages.values())
        lines.append(
            [
                f"  {row.label}",
                str(found.lowest_tier),
                format_seconds(found.step_s),
                simulated,
                format_rate(found.units_per_s),
                f"{found.flops_per_s / 1e12:,.1f}",
                binds,
                format_bytes(found.prediction.peak_bytes["host"]),
                format_bytes(found.prediction.peak_bytes["device"]),
                wear,
                cost,
            ]
        )
    units = {row.found.subject.unit for row in rows if row.found} or {"tokens"}
    unit = units.pop()
    columns = [title, "needs", "step", "simulated", f"{unit}/s", "TFLOPS", "bound by"]
    columns += ["host", "device", "wear years", f"$/M {unit}"]
    why = [f"  {row.label}: {row.why_not}" for row in rows if row.found is None]
    fitting = [row.found for row in rows if row.found]
    notes = dict.fromkeys(
        f"note: {note}" for found in fitting for note in (*found.subject.notes, *notes_on(found.asked))
    )
    below = [line for part in (why, notes) if part for line in ("", *part)]
    return "\n".join([*_in_parts(columns, lines, width), *below])


def _in_parts(columns: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> list[str]:
    """The table, its columns in as many parts as it takes, each of which begins with the first column."""
    sizes = [max(len(line[place]) for line in (columns, *lines)) for place in range(len(columns))]
    parts: list[list[int]] = []
    for place in range(1, len(columns)):
        asked = [*parts[-1], place] if parts else [0, place]
        if parts and width and sum(sizes[p] + len("  ") for p in asked) - len("  ") > width:
            parts.append([0, place])
        else:
            parts[-1:] = [asked]
    text: list[str] = []
    for part in parts:
        left = [at for at, place in enumerate(part) if place in (0, 1, 6)]
        picked = [[line[place] for place in part] for line in lines]
        text += [*([""] if text else []), *table([columns[place] for place in part], picked, left=left)]
    return text


def rows_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """``rows`` as JSON-ready data."""
    return [
        {"case": row.label, **(forecast_data(row.found) if row.found else {"fits": False, "why_not": row.why_not})}
        for row in rows
    ]
