"""plan_command: ``lohan-fx plan``: does it fit, how fast will it be, what should I buy; before training anything.

    lohan-fx plan --model gpt3-175b --batch 8 --seq 1024 --hw rtx4090-12xP5510
    lohan-fx plan --model ./Llama-3.1-8B --hw hw.toml --host-memory 64GiB --best-batch
    lohan-fx plan --model gpt3-13b --batch 32 --compare lohan,zero-infinity
    lohan-fx plan --model gpt3-13b --batch 32 --vary ssds=1..12 --png chart.png

Exit code 0 where the model fits, 2 where memory does not hold it (the message names the smallest change that would do), 1
where the drives are too small, and for bad input. The model is never materialised.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import TorchRuntimeError

import lohan_fx
from lohan_fx.commands.plan_arguments import (
    DEFAULT_HW,
    DEFAULT_POLICY,
    DTYPES,
    NAMES,
    NUMBERS,
    asked_for,
    checked,
    count,
)
from lohan_fx.errors import InfeasiblePlan, NoDrive
from lohan_fx.forecasting.forecast import Asked, Subject, forecast, libraries_silenced
from lohan_fx.forecasting.forecast_table import forecast_data, forecast_text
from lohan_fx.forecasting.formulas import formula_data, formula_text
from lohan_fx.forecasting.max_model import BATCH, limit_data, limit_text, relatives, system_limit
from lohan_fx.forecasting.meta_capture import first_line, meta_capture
from lohan_fx.forecasting.what_if import (
    Row,
    SubjectOf,
    best,
    best_batch,
    compare,
    max_model,
    rows_data,
    rows_text,
    vary,
)
from lohan_fx.forecasting.what_if_chart import draw_rows
from lohan_fx.lean_loss import why_no_lean_loss, with_lean_loss
from lohan_fx.models.model_presets import MODELS
from lohan_fx.models.model_source import ModelSource, UserCodeError, source_of
from lohan_fx.reporting.timeline_chart import draw

GARBAGE = 1_000_000
"""Objects made between two collections."""

FITS, INFEASIBLE = 0, 2

DESCRIPTION = """Say whether a model fits a machine, how fast it will train there, and what that costs, from its
configuration alone. Exit code 0: it fits; 2: memory does not hold it, and the message names the smallest change that would
do; 1: the drives are too small, or bad input."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The arguments. What has a wrong value is refused by us and not by argparse, so that bad input exits with 1."""
    parser.add_argument(
        "--model", metavar="MODEL", help="a preset, a folder with a config.json, or FILE.py:FUNCTION (see dump)"
    )
    parser.add_argument("--batch", metavar="SAMPLES", help="samples per step (1)")
    parser.add_argument("--seq", metavar="TOKENS", help="tokens per sample (1024, or what the model has)")
    parser.add_argument(
        "--hw", metavar="PROFILE", default=DEFAULT_HW, help="a preset, a .toml file, or 'measure' (%(default)s)"
    )
    parser.add_argument(
        "--nvme", nargs="+", default=[], metavar="DIR", help="with --hw measure: one directory per drive"
    )
    parser.add_argument("--host-memory", metavar="BYTES", help="such as 64GiB (most of what the machine has)")
    parser.add_argument("--device-memory", metavar="BYTES", help="such as 20GiB (most of what the device has)")
    parser.add_argument("--policy", help=f"({DEFAULT_POLICY})")
    parser.add_argument("--compute-dtype", default="bfloat16", help=f"{', '.join(DTYPES)} (%(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--best-batch",
        action="store_true",
        help="the batch with the most throughput of those tried: doubled while that gains 1%%, then 3/4 and 3/2 of the best, "
        "and up to the largest that fits, to 5%%",
    )
    what.add_argument(
        "--max-model",
        action="store_true",
        help="the largest model of the preset's kind, at batch 1",
    )
    what.add_argument("--compare", metavar="POLICIES", help="a row per policy: names with commas, or 'all'")
    what.add_argument(
        "--vary", metavar="WHAT=VALUES", help="ssds=1..12, host_memory=128GiB,256GiB, gpu=rtx4090,a100, .."
    )
    parser.add_argument(
        "--lean-loss", action="store_true", help="as if the model were given to lohan_fx.lean_loss.with_lean_loss"
    )
    parser.add_argument(
        "--clipping",
        action="store_true",
        help="gradients are clipped by their global norm: all wait for step(), and updates run beside the next forward",
    )
    parser.add_argument(
        "--forwards", default="1", metavar="COUNT",
        help="how many wait for their backwards at once, as with contrastive losses; each keeps its activations (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--loss-only",
        action="store_true",
        help="the loop keeps nothing of what a call returns but the loss, so logits have no room of their own",
    )
    parser.add_argument(
        "--checkpoints", default="0", metavar="COUNT",
        help="how many are kept, as in lohan_fx.compile; each takes the states' disk space once more (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--formula",
        nargs="?",
        const=NUMBERS,
        metavar=f"{NAMES}|{NUMBERS}",
        help="show how the seconds come about, by our formula and the policy's own, and what would change them",
    )
    parser.add_argument("--no-simulation", action="store_true", help="the formula's seconds only, which is faster")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument("--png", metavar="FILE", help="draw the simulated step, or the table")
    parser.add_argument("--list", action="store_true", help="list the models that have a name")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """The command; its exit code. Raises ``ValueError`` and the like for bad input."""
    if arguments.list:
        print("\n".join(f"{dims.name:<22} {dims.parameters / 1e9:10,.3f}e9  {dims.source}" for dims in MODELS.values()))
        return FITS
    before = gc.get_threshold()
    # Graphs of many thousand nodes are made here, which live until the answer: looking through them again and again for
    # garbage would take a fifth of the time.
    gc.set_threshold(GARBAGE, *before[1:])
    try:
        return _answer(arguments)
    except UserCodeError as error:
        cause = error.__cause__
        if cause is not None:
            traceback.print_exception(cause.with_traceback(_of_the_user(cause)), file=sys.stderr)
        raise
    except NoDrive:  # bad input, by what the profile lacks
        raise
    except InfeasiblePlan as error:
        text = str(error).splitlines()[0]
        print(json.dumps({"fits": False, "why_not": text}, indent=2) if arguments.json else f"does not fit: {text}")
        return INFEASIBLE
    finally:
        gc.set_threshold(*before)


def _of_the_user(error: BaseException) -> Any:
    """The traceback from the first frame of the user's file on, without those of ours and of import's."""
    found = error.__traceback__
    ours = os.path.dirname(lohan_fx.__file__)
    while found is not None and found.tb_next is not None:
        file = found.tb_frame.f_code.co_filename
        if not file.startswith((ours, "<frozen")):
            break
        found = found.tb_next
    # Of a file that is no Python, nothing of the user's ran: the error itself shows the place.
    return None if found is None or found.tb_frame.f_code.co_filename.startswith("<frozen") else found


def _answer(arguments: argparse.Namespace) -> int:
    checked(arguments)
    batch, seq = (count(f"--{name}", getattr(arguments, name)) for name in ("batch", "seq"))
    with _no_warnings():
        source = source_of(arguments.model)
    asked = asked_for(arguments)
    make = functools.partial(_captured, dtype=asked.compute_dtype, lean=arguments.lean_loss)
    subjects = _Subjects(functools.partial(make, source), batch, seq)
    name = Path(source.name).name if source.is_code else source.name
    if arguments.vary is not None:
        return _show(
            arguments, f"{name}, {arguments.vary.partition('=')[0]}", vary(subjects.get, asked, arguments.vary)
        )
    if arguments.compare is not None:
        return _show(arguments, f"{name}, policy", compare(subjects.get, asked, arguments.compare))
    if arguments.best_batch:
        return _show(arguments, f"{name}, batch", best_batch(subjects.get, asked), pick=best)
    if arguments.max_model:
        return _largest_model(arguments, source, asked, seq, make)
    return _single(arguments, subjects.get(None, None, asked.hw.device), asked)


def _single(arguments: argparse.Namespace, subject: Subject, asked: Asked) -> int:
    try:
        found = forecast(subject, asked)
    except InfeasiblePlan as error:
        lean = ["--lean-loss needs less of it"] * (subject.could_be_lean and "device_memory" in str(error))
        error.args = ("; ".join([str(error).splitlines()[0], *lean, *subject.notes]),)
        raise
    if arguments.json:
        data = forecast_data(found) | ({"formulas": formula_data(found)} if arguments.formula else {})
        print(json.dumps(data, indent=2))
    else:
        print(forecast_text(found))
        if arguments.formula:
            print(f"\n{formula_text(found, names=arguments.formula == NAMES)}")
    if arguments.png is not None and found.simulation is not None:
        title = f"{subject.name} on {asked.hw.name}: one step, simulated"
        draw(found.simulation.events, arguments.png, title=title, plan=found.plan)
    return FITS


def _show(
    arguments: argparse.Namespace,
    title: str,
    rows: Sequence[Row],
    *,
    pick: Callable[[Sequence[Row]], Row | None] = best,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Print and draw ``rows``; whether any of them fits is the exit code. ``ValueError`` where no case could be asked for."""
    chosen = pick(rows)
    if rows and all(row.is_bad_input for row in rows):
        raise ValueError(f"{rows[0].why_not} ({title} {rows[0].label})")
    if arguments.json:
        print(json.dumps({"best": chosen.label if chosen else None, "rows": rows_data(rows), **(more or {})}, indent=2))
    else:
        print(rows_text(title, rows, width=shutil.get_terminal_size((0, 0)).columns))
        print(f"\nbest: {chosen.label}" if chosen else "\nnone of them fits")
    if arguments.png is not None and chosen is not None:
        draw_rows(rows, arguments.png, title=title)
    return FITS if chosen else INFEASIBLE


def _largest(rows: Sequence[Row]) -> Row | None:
    fitting = [row for row in rows if row.found is not None]
    return fitting[-1] if fitting else None


class _Subjects:
    """Captures of one model, each shape and device once."""

    def __init__(self, make: SubjectOf, batch: int | None, seq: int | None) -> None:
        self._make, self._batch, self._seq = make, batch, seq
        self._last: tuple[tuple[int | None, int | None, str], Subject] | None = None

    def get(self, batch: int | None, seq: int | None, device: str) -> Subject:
        """The model at this shape, None for what was asked for on the command line, as a ``device`` runs it."""
        case = (batch or self._batch, seq or self._seq, device)
        # Only the last is kept: a graph of many blocks takes some hundred MB.
        if self._last is None or self._last[0] != case:
            self._last = None
            self._last = (case, self._make(*case))
        return self._last[1]


def _captured(
    source: ModelSource, batch: int | None, seq: int | None, device: str, *, dtype: torch.dtype, lean: bool = False
) -> Subject:
    """``ValueError`` where an operation of a config's model fails; of the user's own code the error is shown as it is."""
    try:
        with libraries_silenced():
            with contextlib.nullcontext() if source.is_code else _no_warnings():
                example = source.make(batch, seq)
            with _no_warnings():
                model = with_lean_loss(example.model) if lean else example.model
                could_be_lean = "labels" in example.inputs and not why_no_lean_loss(model)
                capture = meta_capture(model, example.inputs, compute_dtype=dtype, device=device)
    except TorchRuntimeError as error:
        if source.is_code:
            raise
        why = first_line(error)
        if "scalar type" in why and dtype is not torch.float32:
            raise ValueError(
                f"{source.name}: the model of this config does not run in {dtype}, since some of what it computes with stays "
                f"float32: {why}; choose --compute-dtype float32"
            ) from error
        raise ValueError(
            f"{source.name}: the model of this config does not run, so its sizes do not go together: {why}"
        ) from error
    except RuntimeError as error:
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        if asked is None:
            raise
        raise ValueError(
            f"{source.name} at this batch and sequence has a tensor of {int(asked.group(1)):,} bytes, more than this "
            "machine lets a process map: choose a smaller batch, sequence or model"
        ) from error
    return Subject(source.name, capture, example.samples, example.tokens, example.unit, could_be_lean, example.notes)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """What libraries log and warn of while they build and trace a model is no part of the answer."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _largest_model(
    arguments: argparse.Namespace,
    source: ModelSource,
    asked: Asked,
    seq: int | None,
    make: Callable[[ModelSource, int, int | None, str], Subject],
) -> int:
    """What our planner can do under the policy, and what its system itself could: batch 1 (LoHan's protocol, L-EX-01)."""
    models = relatives(source.name, source.dims, seq)
    subjects = [
        (dims.name, functools.partial(make, source_of(dims.name), BATCH, seq, asked.hw.device)) for dims in models
    ]
    limit = system_limit(models, asked, seq)
    rows = max_model(subjects, asked)
    code = _show(arguments, "largest model", rows, pick=_largest, more={"system": limit_data(limit)})
    if not arguments.json:
        print(f"\n{limit_text(limit)}")
    return code
