"""plan_arguments: what ``lohan-fx plan`` was asked for, refused where it cannot be meant."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch

from lohan_fx.forecasting.forecast import Asked
from lohan_fx.forecasting.what_if import MOST, varied
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planning.budgets import parse_bytes
from lohan_fx.policies import named
from lohan_fx.presets import PRESETS
from lohan_fx.runtime.manifest import MAX_SLOTS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_HW = "rtx4090-12xP5510"
DEFAULT_POLICY = "lohan"
NAMES, NUMBERS = "names", "numbers"
PICTURES = (".png", ".pdf", ".svg")

SECONDS = ("op_overhead_s", "io_core_s_per_request", "interpreter_s_per_job", "handover_s")
SECONDS_PER_BYTE = ("io_core_s_per_byte", "clearing_s_per_byte")
RATES = ("memory_bytes_per_s", "host_memory_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")
DRIVE_RATES = ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s")
PLAUSIBLE_RATE = (1e5, 1e15)
PLAUSIBLE_BYTES = (1 << 20, 1 << 53)
PLAUSIBLE_FLOPS = (1e7, 1e19)
PLAUSIBLE_UPDATES = (1e4, 1e15)
PLAUSIBLE_SECONDS = (0.0, 1.0)
PLAUSIBLE_SECONDS_PER_BYTE = (0.0, 1e-5)
"""Outside of these a profile has other units, or more digits, than were meant."""


def checked(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be answered before anything is computed."""
    if not arguments.model:
        raise ValueError(
            "--model is missing: a preset (--list shows them), a folder with a config.json, or FILE.py:FUNCTION"
        )
    if arguments.formula not in (None, NAMES, NUMBERS):
        raise ValueError(f"--formula is {arguments.formula!r}: expected {NAMES} or {NUMBERS}")
    _check_combination(arguments)
    if arguments.png is not None:
        _check_picture(Path(arguments.png))


def asked_for(arguments: argparse.Namespace) -> Asked:
    """What the forecast is for. ``ValueError`` names the option that is wrong."""
    if arguments.compute_dtype not in DTYPES:
        raise ValueError(f"--compute-dtype is {arguments.compute_dtype!r}: expected one of {', '.join(DTYPES)}")
    policy = DEFAULT_POLICY if arguments.policy is None else arguments.policy
    named(policy)
    return Asked(
        hw=_profile(arguments),
        policy=policy,
        host_memory_bytes=_bytes("--host-memory", arguments.host_memory),
        device_memory_bytes=_bytes("--device-memory", arguments.device_memory),
        compute_dtype=DTYPES[arguments.compute_dtype],
        simulated=not arguments.no_simulation,
        clipping=arguments.clipping,
        checkpoints=_checkpoints(arguments.checkpoints),
        forwards=count("--forwards", arguments.forwards) or 1,
        loss_only=arguments.loss_only,
    )


def count(name: str, text: str | None) -> int | None:
    """A number of samples, tokens or forwards."""
    if text is None:
        return None
    digits = text.strip()
    if not digits.isdecimal() or not 1 <= int(digits) <= MOST:
        raise ValueError(f"{name} is {text!r}: expected a whole number from 1 to {MOST:,}")
    return int(digits)


def _checkpoints(text: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or int(digits) >= MAX_SLOTS:
        raise ValueError(f"--checkpoints is {text!r}: expected how many to keep, 0 to {MAX_SLOTS - 1}")
    return int(digits)


def _check_combination(arguments: argparse.Namespace) -> None:
    """Refuse options of which one says what another one decides, or would be ignored."""
    decides = [
        (arguments.best_batch, "--best-batch looks for the batch itself", "batch"),
        (arguments.max_model, "--max-model takes batch 1, as the papers do", "batch"),
        (arguments.compare is not None, "--compare names the policies", "policy"),
    ]
    if arguments.vary is not None:
        name = varied(arguments.vary)
        decides.append((True, f"--vary {name} says which", name))
    for is_on, why, option in decides:
        if is_on and getattr(arguments, option, None) is not None:
            raise ValueError(f"{why}: leave --{option.replace('_', '-')} out")
    several = [option for is_on, option in _several(arguments) if is_on]
    if several and arguments.formula is not None:
        raise ValueError(f"--formula explains one forecast: leave {several[0]} out")
    if arguments.png is not None and arguments.no_simulation and not several:
        raise ValueError("--png draws the simulated step: leave --no-simulation out")


def _several(arguments: argparse.Namespace) -> tuple[tuple[bool, str], ...]:
    """Which options make a row per case."""
    return (
        (arguments.best_batch, "--best-batch"),
        (arguments.max_model, "--max-model"),
        (arguments.compare is not None, "--compare"),
        (arguments.vary is not None, "--vary"),
    )


def _check_picture(path: Path) -> None:
    """Refuse a file that cannot be written, before minutes are spent on what goes there."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--png is {str(path)!r}: expected a file whose name ends in {', '.join(PICTURES)}")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"--png: there is no directory {path.resolve().parent}")
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"--png: {path} cannot be written ({error.strerror}): choose another place") from error


# --- the machine ----------------------------------------------------------------------------------------------


def _profile(arguments: argparse.Namespace) -> HardwareProfile:
    name = arguments.hw
    if name == "measure":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return HardwareProfile.measure(arguments.nvme)
    if arguments.nvme:
        raise ValueError("--nvme goes with --hw measure; a profile brings its own drives")
    is_file = name not in PRESETS and (name.endswith(".toml") or os.sep in name)
    if not is_file:
        return HardwareProfile.preset(name)
    if Path(name).is_dir():
        raise ValueError(f"--hw: {name} is a directory: expected a file that HardwareProfile.save wrote")
    return _plausible(HardwareProfile.load(name), name)


def _plausible(hw: HardwareProfile, path: str) -> HardwareProfile:
    """``hw``; ``ValueError`` for a number that is in other units than a profile's, such as GB where bytes are meant."""
    rates = [(field, getattr(hw, field)) for field in RATES]
    sizes = [(field, getattr(hw, field)) for field in ("device_memory_bytes", "host_memory_bytes")]
    for number, drive in enumerate(hw.nvme, start=1):
        measured = [("", drive), *((f" at {rate.request_bytes} bytes", rate) for rate in drive.by_request)]
        rates += [(f"{f} of nvme {number}{at}", getattr(rate, f)) for at, rate in measured for f in DRIVE_RATES]
        sizes += [(f"{field} of nvme {number}", getattr(drive, field)) for field in ("capacity_bytes", "drive_bytes")]
    flops = [(f"matmul_flops_per_s of {dtype}", rate) for dtype, rate in hw.matmul_flops_per_s.items()]
    updates = [("adam_parameters_per_s", hw.adam_parameters_per_s)]
    seconds, per_byte = ([(field, getattr(hw, field)) for field in fields] for fields in (SECONDS, SECONDS_PER_BYTE))
    for found, (least, most), unit in (
        (flops, PLAUSIBLE_FLOPS, "flop per second (165 TFLOPS are 165e12)"),
        (updates, PLAUSIBLE_UPDATES, "parameters per second (a billion are 1e9)"),
        (seconds, PLAUSIBLE_SECONDS, "seconds (10 us are 1e-5)"),
        (per_byte, PLAUSIBLE_SECONDS_PER_BYTE, "seconds per byte (60 ps are 6e-11)"),
        (rates, PLAUSIBLE_RATE, "bytes per second (21 GB/s are 21e9)"),
        (sizes, PLAUSIBLE_BYTES, "bytes (24 GiB are 25_769_803_776)"),
    ):
        for field, value in found:
            if not least <= value <= most:
                raise ValueError(f"{path}: {field} is {value:g}: no machine has that; expected {unit}")
    return hw


def _bytes(name: str, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text, name)
