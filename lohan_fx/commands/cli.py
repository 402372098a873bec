"""The command ``lohan-fx``: show what would be done to a model, and measure the machine.

    lohan-fx dump plan.json                                  a plan saved with Plan.to_json
    lohan-fx dump --model train.py:example --host-memory 4GiB    compile, capture and print; nothing is run
    lohan-fx plan --model gpt3-175b --batch 8 --hw rtx4090-12xP5510    does it fit, how fast, what should I buy
    lohan-fx policies                                        what --policy takes: what goes where, which run
    lohan-fx measure --nvme /mnt/nvme0 --output hw.toml      a hardware profile of this machine

Bad input ends with one line on stderr and exit code 1 (2 where the arguments themselves are wrong;
of `plan` 1, because there 2 says that the model does not fit).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch._dynamo.exc import TorchDynamoException

import lohan_fx
from lohan_fx.commands.fsck_command import add_checkpoint_commands
from lohan_fx.commands.plan_arguments import DTYPES
from lohan_fx.commands.plan_command import DESCRIPTION, add_plan
from lohan_fx.compile import compiled
from lohan_fx.errors import CaptureError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.model_source import example_of
from lohan_fx.plan import Plan
from lohan_fx.policies import POLICIES
from lohan_fx.presets import PRESETS
from lohan_fx.store_directories import default_nvme_root, made_for_this_run

DEFAULT_PRESET = "rtx4090-12xP5510"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    code: int | None = 0
    try:
        parser = _parser()
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            (arguments.parser if arguments.command == "plan" else parser).error(message)
        run: Callable[[argparse.Namespace], int | None] = arguments.run
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has stopped (`| head`); nothing is left to be told, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        print(f"lohan-fx: {_told(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def _told(error: Exception) -> str:
    """One line; of a failed capture all, because the place and the reason are on different lines of it."""
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, CaptureError | TorchDynamoException) else text.splitlines()[0]


class _Parser(argparse.ArgumentParser):
    """Exits with 2 where the arguments are wrong; `plan`, where 2 says that the model does not fit, with 1."""

    def error(self, message: str) -> NoReturn:
        if self.prog.endswith(" plan"):
            raise ValueError(f"{message}; lohan-fx plan --help shows the arguments")
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lohan-fx", description="Fine-tune models far too big for GPU and RAM.")
    parser.add_argument("--version", action="version", version=f"lohan-fx {lohan_fx.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_dump(commands.add_parser("dump", help="show a plan, or the graphs of a model", description=_DUMP))
    plan = commands.add_parser("plan", help="does a model fit, how fast, what to buy", description=DESCRIPTION)
    plan.set_defaults(parser=plan)
    add_plan(plan)
    listed = commands.add_parser("policies", help="what --policy takes", description=_POLICIES)
    listed.set_defaults(run=_policies)
    _add_measure(commands.add_parser("measure", help="measure this machine", description=_MEASURE))
    add_checkpoint_commands(commands.add_parser)
    return parser


_DUMP = """Show a saved plan; or compile the model that a function returns, capture its graphs for the example inputs
and show the plan and the rewritten graphs. The model is stored in a temporary directory; nothing is trained."""
_POLICIES = (
    "Show the policies that --policy takes: whose they are, what goes where, and which of them this runtime runs."
)
_MEASURE = "Measure this machine in about 20 seconds, and write or print its hardware profile as TOML."


def _add_dump(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", metavar="PLAN.json", help="a plan saved with Plan.to_json()")
    parser.add_argument(
        "--model", metavar="FILE.py:FUNCTION", help="a function that returns (model, dict of its inputs)"
    )
    parser.add_argument("--hw", metavar="PROFILE", default=DEFAULT_PRESET, help="a preset or .toml file (%(default)s)")
    parser.add_argument("--host-memory", metavar="BYTES", help="such as 4GiB")
    parser.add_argument("--device-memory", metavar="BYTES", help="such as 20GiB")
    parser.add_argument("--compute-dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    parser.add_argument("--policy", choices=POLICIES, default="lohan", help="(%(default)s)")
    parser.add_argument("--nvme", metavar="DIR", help=f"make the temporary directory there ({default_nvme_root()})")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument("--unfold", action="store_true", help="show each layer, also where they are equal")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="cut longer lines")
    parser.set_defaults(run=_dump)


def _add_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme", nargs="+", default=[], metavar="DIR", help="one directory per drive")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(cuda where there is one)")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long to measure (%(default)s)")
    parser.add_argument("--output", metavar="HW.toml", help="write the profile there instead of printing it")
    parser.set_defaults(run=_measure)


# --- dump -----------------------------------------------------------------------------------------------------


def _dump(arguments: argparse.Namespace) -> None:
    if (arguments.plan is None) == (arguments.model is None):
        raise ValueError("dump takes either a plan file or --model FILE.py:FUNCTION")
    text = _dumped_plan(arguments) if arguments.model is None else _dumped_model(arguments)
    print(text, end="" if text.endswith("\n") else "\n")


def _dumped_plan(arguments: argparse.Namespace) -> str:
    path = Path(arguments.plan)
    if not path.is_file():
        raise ValueError(f"{path} is no file: name one that Plan.to_json was written to, or a model by --model")
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no saved plan, which is JSON ({error}): name one, or a model by --model"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return lohan_fx.dump(plan, format="json" if arguments.json else "text", width=arguments.width)


def _dumped_model(arguments: argparse.Namespace) -> str:
    hw = _profile(arguments.hw)
    model, inputs = example_of(arguments.model)
    root = default_nvme_root() if arguments.nvme is None else Path(arguments.nvme)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--nvme: {root} cannot be made ({error.strerror}): choose another place") from error
    # A run's own directory: other runs leave it alone, and a later one removes it should this one be killed.
    directory, remove = made_for_this_run(root)
    try:
        with warnings.catch_warnings():
            # Planning for another machine than this one is what --hw is for.
            warnings.filterwarnings("ignore", message="the hardware profile .* was not measured on this machine")
            lohan_fx.compile(
                model,
                hw,
                host_memory=arguments.host_memory,
                device_memory=arguments.device_memory,
                nvme=[directory],
                compute_dtype=DTYPES[arguments.compute_dtype],
                policy=arguments.policy,
            )
        try:
            lohan_fx.prepare(model, **inputs)
            return lohan_fx.dump(
                model, format="json" if arguments.json else "text", unfold=arguments.unfold, width=arguments.width
            )
        finally:
            compiled(model).detach()
    finally:
        remove()


def _profile(name: str) -> HardwareProfile:
    """The profile in a file or of a preset; without CUDA here, with the CPU as its compute device."""
    is_file = name not in PRESETS and (name.endswith(".toml") or os.sep in name)
    hw = HardwareProfile.load(name) if is_file else HardwareProfile.preset(name)
    if hw.device == "cuda" and not torch.cuda.is_available():
        print(f"lohan-fx: no CUDA here: {hw.name} is taken with the CPU as its compute device", file=sys.stderr)
        return dataclasses.replace(hw, device="cpu")
    return hw


def _policies(arguments: argparse.Namespace) -> None:
    del arguments
    print(lohan_fx.policies())


# --- measure --------------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace) -> None:
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and not output.resolve().parent.is_dir():
        raise ValueError(f"--output: there is no directory {output.resolve().parent}")
    if output is not None and output.is_dir():
        raise ValueError(f"--output: {output} is a directory: name a file in it, such as {output / 'hw.toml'}")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        profile = HardwareProfile.measure(arguments.nvme, device=arguments.device, seconds=arguments.seconds)
    for warning in warned:
        print(f"lohan-fx: warning: {warning.message}", file=sys.stderr)
    if output is not None:
        profile.save(output)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "hw.toml")
        profile.save(path)
        print(path.read_text(encoding="utf-8"), end="")
