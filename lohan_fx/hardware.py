"""The hardware profile: how fast and how large the machine is that a plan is made for.

A profile is measured (`HardwareProfile.measure`), read from a file (`load`), or one of the papers' servers
(`preset`). It is frozen and checked when made: whoever holds one may divide by its rates.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_type_hints

import numpy as np
import torch

from lohan_fx.measuring import machine

DTYPES = ("float32", "bfloat16", "float16")
MEASUREMENT = "6"
"""Goes up where what `measure` does has changed so that the rates of before would mislead; among a profile's versions."""
NO_KERNELS = 4
"""A dtype whose matmuls take so many times as long as those in float32 has none; they usually take a hundred times as long."""

V = TypeVar("V")


class FrozenMapping(Mapping[str, V]):
    """A mapping that cannot change, so that a frozen dataclass that holds one hashes, copies and pickles."""

    def __init__(self, items: Mapping[str, V]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


# The text beside a field's type is its meaning and unit; the file writer puts it behind the value.
@dataclass(frozen=True)
class RequestRate:
    """Rates of one drive when every read and write has `request_bytes`."""

    request_bytes: Annotated[int, "bytes per read or write"]
    read_bytes_per_s: Annotated[float, "bytes/s"]
    write_bytes_per_s: Annotated[float, "bytes/s"]
    mixed_bytes_per_s: Annotated[float, "bytes/s, reads plus writes, alternating"]

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class NvmeProfile:
    """One directory on a drive. Its rates hold while all drives of the profile work at once, so that they add up.

    `capacity_bytes` is what may be stored there: the free space when measured, the whole drive in a preset; `drive_bytes` the
    whole drive, whose wear counts, `capacity_bytes` where that is not known. Directories on one drive share both.
    """

    directory: Annotated[str, 'a directory on the drive; "" in a preset']
    read_bytes_per_s: Annotated[float, "bytes/s"]
    write_bytes_per_s: Annotated[float, "bytes/s"]
    mixed_bytes_per_s: Annotated[float, "bytes/s, reads plus writes, alternating"]
    capacity_bytes: Annotated[int, "bytes free for lohan_fx when measured"]
    by_request: tuple[RequestRate, ...] = ()
    drive_bytes: Annotated[int | None, "bytes of the whole drive"] = None

    def __post_init__(self) -> None:
        _check_fields(self)
        whole = self.capacity_bytes if self.drive_bytes is None else self.drive_bytes
        _set(self, "drive_bytes", _checked_number("NvmeProfile.drive_bytes", whole, int))
        _set(self, "by_request", _elements(self, "by_request", RequestRate))

    @property
    def stripe_weight(self) -> float:
        """What its share of a store that is striped over several drives is in proportion to."""
        return self.mixed_bytes_per_s

    def at_requests(self, nbytes: int) -> Self:
        """The same drive with its rates for reads and writes of ``nbytes``: between two measured sizes on the line over the
        logarithm of the size, beyond them those of the nearest; as they are where none was measured."""
        measured = sorted(self.by_request, key=lambda rate: rate.request_bytes)
        if not measured:
            return self
        sizes = [math.log(rate.request_bytes) for rate in measured]

        def between(rates: Sequence[float]) -> float:
            return float(np.interp(math.log(nbytes), sizes, rates))

        return replace(
            self,
            read_bytes_per_s=between([rate.read_bytes_per_s for rate in measured]),
            write_bytes_per_s=between([rate.write_bytes_per_s for rate in measured]),
            mixed_bytes_per_s=between([rate.mixed_bytes_per_s for rate in measured]),
        )


@dataclass(frozen=True)
class Prices:
    """What the machine costs, in US dollars."""

    server_usd: Annotated[float, "US dollars, without GPU and drives"]
    gpu_usd: Annotated[float, "US dollars per GPU"]
    ssd_usd: Annotated[float, "US dollars per drive"]

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class HardwareProfile:
    """Rates and sizes of one machine with one compute device; every number is positive and finite.

    Memory bandwidths count bytes read plus bytes written; link rates count the bytes that cross once. With
    `device` "cpu" the processor is the compute device too and the links are copies within RAM.
    """

    name: Annotated[str, "free text"]
    device: Annotated[str, "cpu or cuda"]
    device_name: Annotated[str, "the compute device"]
    cpu_name: Annotated[str, "the processor"]
    cpu_cores: Annotated[int, "logical processors"]
    matmul_flops_per_s: Annotated[Mapping[str, float], "flop/s of a large square matmul (2 n^3 flop), by dtype"]
    memory_bytes_per_s: Annotated[float, "bytes/s read plus written, pointwise work in device memory"]
    host_memory_bytes_per_s: Annotated[float, "bytes/s read plus written, copies within host memory"]
    h2d_bytes_per_s: Annotated[float, "bytes/s, host to device"]
    d2h_bytes_per_s: Annotated[float, "bytes/s, device to host"]
    adam_parameters_per_s: Annotated[float, "parameters/s, fp32 Adam on the processor"]
    device_memory_bytes: Annotated[int, "bytes"]
    host_memory_bytes: Annotated[int, "bytes"]
    nvme: Annotated[tuple[NvmeProfile, ...], "one per directory"]
    op_overhead_s: Annotated[float, "seconds to launch one small eager op"]
    measured_at: Annotated[str, 'ISO 8601 date and time; "" if not measured']
    versions: Annotated[Mapping[str, str], "of the software it was measured with"]
    machine: Annotated[str, 'fingerprint of the measured machine; "" if not measured']
    prices: Annotated[Prices | None, "US dollars"] = None
    io_core_s_per_request: Annotated[float, "seconds that compute loses to a read or write of any size"] = 1.5e-4
    io_core_s_per_byte: Annotated[float, "the same per byte read or written"] = 6e-11
    interpreter_s_per_job: Annotated[
        float, "seconds that a lane's job takes from the thread that launches a GPU's kernels"
    ] = 1e-4  # docs/0044
    handover_s: Annotated[float, "seconds that a CPU's compute takes to hand a transfer to the lanes"] = 1e-9  # none
    clearing_s_per_byte: Annotated[
        float, "seconds that a CPU's compute takes longer on memory fresh from the kernel"
    ] = 1e-15  # none

    def __post_init__(self) -> None:
        _check_fields(self)
        for field in ("name", "device_name", "cpu_name"):
            if not getattr(self, field):
                raise ValueError(f"HardwareProfile.{field} is empty: expected a name")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"HardwareProfile.device is {self.device!r}: expected 'cpu' or 'cuda'")
        _set(self, "matmul_flops_per_s", _checked_matmul(self.matmul_flops_per_s))
        _set(self, "nvme", _elements(self, "nvme", NvmeProfile))
        if self.measured_at:
            try:
                datetime.fromisoformat(self.measured_at)
            except ValueError as error:
                message = f"HardwareProfile.measured_at is {self.measured_at!r}: expected an ISO 8601 date and time"
                raise ValueError(message) from error
        _set(self, "versions", _checked_versions(self.versions))
        if not isinstance(self.prices, Prices | None):
            raise TypeError(f"HardwareProfile.prices is {self.prices!r}: expected Prices or None")

    @classmethod
    def measure(
        cls,
        nvme: str | Path | Sequence[str | Path] = (),
        *,
        device: str | None = None,
        progress: bool = True,
        seconds: float = 20.0,
    ) -> HardwareProfile:
        """Measure this machine in about `seconds`, with one directory per drive in `nvme`.

        `device` is "cuda" where there is one, else "cpu". Progress goes to stderr. Raises ValueError for a
        directory that is missing, not writable or too full; removes the files it writes.
        """
        from lohan_fx.measuring.measure import measure

        return measure(
            [nvme] if isinstance(nvme, str | Path) else nvme, device=device, progress=progress, seconds=seconds
        )

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read what `save` wrote. ValueError or TypeError name the file and the key that is wrong."""
        from lohan_fx.hardware_file import read

        return read(Path(path))

    def save(self, path: str | Path) -> None:
        """Write the profile as TOML, each number with its unit."""
        from lohan_fx.hardware_file import write

        write(self, Path(path))

    @classmethod
    def preset(cls, name: str) -> HardwareProfile:
        """One of the papers' machines; where a paper gives no number, `lohan_fx/presets.py` says what stands in."""
        from lohan_fx.presets import PRESETS

        if name not in PRESETS:
            close = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
            raise ValueError(f"no hardware preset {name!r}{hint} There are: {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def fingerprint(cls) -> str:
        """The `machine` that a profile measured here gets."""
        return machine.fingerprint()

    def is_this_machine(self) -> bool:
        """Whether the profile was measured on a machine like this one; False for a preset."""
        return self.machine == self.fingerprint()

    def is_outdated(self) -> bool:
        """Whether the profile was measured, and by a `measure` that went about it otherwise than this version's."""
        return bool(self.measured_at) and self.versions.get("measurement") != MEASUREMENT

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """Flop/s of a large matmul in `dtype`; ValueError if the profile has none for it."""
        key = str(dtype).removeprefix("torch.")
        if key not in self.matmul_flops_per_s:
            known = ", ".join(f"torch.{name}" for name in self.matmul_flops_per_s)
            raise ValueError(f"no matmul rate for {dtype} in the hardware profile {self.name!r}: it has {known}")
        return self.matmul_flops_per_s[key]

    def lacks_kernels(self, dtype: torch.dtype) -> bool:
        """Whether matmuls in `dtype` are as slow as those in half precision are on a processor without AVX-512 or AMX;
        ValueError if the profile has no rate for it."""
        return self.matmul_rate(dtype) * NO_KERNELS <= self.matmul_flops_per_s.get("float32", 0.0)

    def usual_dtype(self) -> torch.dtype:
        """What one trains in here: bfloat16, or float32 where there are no kernels for that."""
        return torch.float32 if self.lacks_kernels(torch.bfloat16) else torch.bfloat16

    def at_requests(self, nbytes: int) -> Self:
        """The same machine with its drives' rates for reads and writes of ``nbytes`` (``NvmeProfile.at_requests``)."""
        return replace(self, nvme=tuple(drive.at_requests(nbytes) for drive in self.nvme))

    @property
    def ssd_read_bytes_per_s(self) -> float:
        """Bytes/s of all drives reading together; 0 without drives."""
        return math.fsum(drive.read_bytes_per_s for drive in self.nvme)

    @property
    def ssd_write_bytes_per_s(self) -> float:
        """Bytes/s of all drives writing together; 0 without drives."""
        return math.fsum(drive.write_bytes_per_s for drive in self.nvme)

    @property
    def ssd_mixed_bytes_per_s(self) -> float:
        """Bytes/s, reads plus writes, of all drives alternating between the two; 0 without drives."""
        return math.fsum(drive.mixed_bytes_per_s for drive in self.nvme)


def _plain_fields(kind: type) -> dict[str, type]:
    """Name and type of the fields of `kind` that hold one number or one text."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if hints[field.name] in (int, float, str)}


def _check_fields(item: object) -> None:
    """Refuse a wrong number or text; whole numbers become float where the field is one, so 3 and 3.0 are equal."""
    owner = type(item).__name__
    for name, kind in _plain_fields(type(item)).items():
        value = getattr(item, name)
        if kind is str:
            _check_text(f"{owner}.{name}", value)
        else:
            _set(item, name, _checked_number(f"{owner}.{name}", value, kind))


def _checked_number(field: str, value: object, kind: type) -> float:
    expected = "a whole number above zero" if kind is int else "a finite number above zero"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise TypeError(f"{field} is {value!r} ({type(value).__name__}): expected {expected}")
    # NaN fails the comparison too; the bound keeps infinity and integers that no float can hold out.
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{field} is {value!r}: expected {expected}")
    return value if kind is int else float(value)


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{field} is {value!r} ({type(value).__name__}): expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} is {value!r}: expected text that UTF-8 can hold, in which it is saved") from error


def _checked_matmul(rates: object) -> FrozenMapping[float]:
    field = "HardwareProfile.matmul_flops_per_s"
    if not isinstance(rates, Mapping):
        raise TypeError(f"{field} is {rates!r} ({type(rates).__name__}): expected a mapping of dtype name to flop/s")
    if not rates or not set(rates) <= set(DTYPES):
        raise ValueError(f"{field} has the keys {list(rates)}: expected one or more of {', '.join(DTYPES)}")
    return FrozenMapping({key: _checked_number(f"{field}[{key!r}]", rate, float) for key, rate in rates.items()})


def _checked_versions(versions: object) -> FrozenMapping[str]:
    field = "HardwareProfile.versions"
    if not isinstance(versions, Mapping):
        raise TypeError(f"{field} is {versions!r} ({type(versions).__name__}): expected a mapping of name to version")
    for key, version in versions.items():
        _check_text(f"a key of {field}", key)
        _check_text(f"{field}[{key!r}]", version)
    return FrozenMapping(versions)


def _elements(item: object, name: str, kind: type) -> tuple[Any, ...]:
    """The field as a tuple, each element checked to be a `kind`."""
    value = getattr(item, name)
    field = f"{type(item).__name__}.{name}"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{field} is {value!r} ({type(value).__name__}): expected a tuple of {kind.__name__}")
    elements = tuple(value)
    for index, element in enumerate(elements):
        if not isinstance(element, kind):
            raise TypeError(f"{field}[{index}] is {element!r}: expected a {kind.__name__}")
    return elements


def _set(item: object, name: str, value: object) -> None:
    """Normalise a field of a frozen instance that is still being made."""
    object.__setattr__(item, name, value)
