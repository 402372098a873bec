"""The hardware profile: what it refuses and what it answers."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from lohan_fx.hardware import MEASUREMENT, HardwareProfile, NvmeProfile, Prices, RequestRate
from lohan_fx.measuring import machine
from lohan_fx.presets import PRESETS

REQUEST = RequestRate(request_bytes=2**20, read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1.5e9)
DRIVE = NvmeProfile("/nvme", 2e9, 1e9, 1.5e9, 10**12, (REQUEST,))
PROFILE = HardwareProfile(
    name="a box",
    device="cpu",
    device_name="a processor",
    cpu_name="a processor",
    cpu_cores=2,
    matmul_flops_per_s={"float32": 1e11, "bfloat16": 5e11},
    memory_bytes_per_s=2e10,
    host_memory_bytes_per_s=2e10,
    h2d_bytes_per_s=1e10,
    d2h_bytes_per_s=1e10,
    adam_parameters_per_s=5e8,
    device_memory_bytes=2**34,
    host_memory_bytes=2**35,
    nvme=(DRIVE, replace(DRIVE, directory="/nvme1", by_request=())),
    op_overhead_s=2e-6,
    measured_at="2025-01-02T03:04:05+00:00",
    versions={"torch": "2.13.0"},
    machine="a processor, 2 cores",
    prices=Prices(14098, 1600, 308),
)
RECORDS: dict[str, Any] = {"profile": PROFILE, "drive": DRIVE, "request": REQUEST, "prices": PROFILE.prices}


def _fields_with(value_type: type) -> list[Any]:
    return [
        pytest.param(record, field.name, id=f"{kind}-{field.name}")
        for kind, record in RECORDS.items()
        for field in fields(record)
        if type(getattr(record, field.name)) is value_type
    ]


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, -math.inf, 0, 10**400])
@pytest.mark.parametrize(("record", "field"), _fields_with(float))
def test_a_rate_is_finite_and_above_zero(record: Any, field: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} is .*: expected a finite number above zero") as caught:
        replace(record, **{field: wrong})
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize(("record", "field"), _fields_with(int))
def test_a_size_is_above_zero(record: Any, field: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {wrong}: expected a whole number above zero"):
        replace(record, **{field: wrong})


def test_a_drive_whose_size_is_not_known_is_as_large_as_what_it_holds() -> None:
    assert DRIVE.drive_bytes == DRIVE.capacity_bytes
    assert dataclasses.replace(DRIVE, drive_bytes=4 * DRIVE.capacity_bytes).drive_bytes == 4 * DRIVE.capacity_bytes
    with pytest.raises(ValueError, match=r"drive_bytes is 0: expected a whole number above zero"):
        dataclasses.replace(DRIVE, drive_bytes=0)


@pytest.mark.parametrize(
    ("record", "field", "wrong"),
    [
        (*case.values, wrong)
        for case in _fields_with(float) + _fields_with(int)
        for wrong in ("1", None, True, [1])
        if (case.values[1], wrong) != ("drive_bytes", None)
    ],
)
def test_a_number_is_a_number(record: Any, field: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=rf"{field} is .*{type(wrong).__name__}.*: expected a (finite|whole) number"):
        replace(record, **{field: wrong})


@pytest.mark.parametrize(("record", "field"), _fields_with(int))
def test_a_size_is_whole(record: Any, field: str) -> None:
    with pytest.raises(TypeError, match=rf"{field} is 1\.5 \(float\): expected a whole number"):
        replace(record, **{field: 1.5})


@pytest.mark.parametrize(("record", "field"), _fields_with(str))
def test_a_text_is_a_string_that_can_be_saved(record: Any, field: str) -> None:
    with pytest.raises(TypeError, match=rf"{field} is 3 \(int\): expected a string"):
        replace(record, **{field: 3})
    with pytest.raises(ValueError, match=rf"{field} is .*: expected text that UTF-8 can hold"):
        replace(record, **{field: "/nvme\udcff"})


@pytest.mark.parametrize(
    ("field", "wrong", "error", "message"),
    [
        ("name", "", ValueError, "name is empty"),
        ("device_name", "", ValueError, "device_name is empty"),
        ("cpu_name", "", ValueError, "cpu_name is empty"),
        ("device", "tpu", ValueError, "device is 'tpu': expected 'cpu' or 'cuda'"),
        ("measured_at", "yesterday", ValueError, "measured_at is 'yesterday': expected an ISO 8601"),
        ("matmul_flops_per_s", {}, ValueError, "expected one or more of float32, bfloat16, float16"),
        ("matmul_flops_per_s", {"int8": 1.0}, ValueError, r"keys \['int8'\]: expected one or more of float32"),
        ("matmul_flops_per_s", {"float32": -1.0}, ValueError, r"matmul_flops_per_s\['float32'\] is -1.0"),
        ("matmul_flops_per_s", {"float32": "fast"}, TypeError, r"matmul_flops_per_s\['float32'\] is 'fast'"),
        ("matmul_flops_per_s", 1e12, TypeError, "expected a mapping of dtype name"),
        ("versions", {"torch": 2}, TypeError, r"versions\['torch'\] is 2"),
        ("versions", {2: "torch"}, TypeError, "a key of HardwareProfile.versions is 2"),
        ("versions", "2.13", TypeError, "expected a mapping of name to version"),
        ("nvme", DRIVE, TypeError, "expected a tuple of NvmeProfile"),
        ("nvme", ("/nvme",), TypeError, r"nvme\[0\] is '/nvme': expected a NvmeProfile"),
        ("nvme", "/nvme", TypeError, "expected a tuple of NvmeProfile"),
        ("prices", 14098, TypeError, "prices is 14098: expected Prices or None"),
    ],
)
def test_other_wrong_values(field: str, wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(PROFILE, **{field: wrong})


def test_request_rates_are_request_rates() -> None:
    with pytest.raises(TypeError, match=r"NvmeProfile.by_request\[1\] is 7: expected a RequestRate"):
        replace(DRIVE, by_request=(REQUEST, 7))  # type: ignore[arg-type]


def test_whole_numbers_are_taken_for_rates() -> None:
    profile = replace(PROFILE, h2d_bytes_per_s=10**10, matmul_flops_per_s={"float32": 3})
    assert isinstance(profile.h2d_bytes_per_s, float)
    assert isinstance(profile.matmul_flops_per_s["float32"], float)


def test_drives_may_come_in_a_list() -> None:
    assert replace(PROFILE, nvme=[DRIVE]).nvme == (DRIVE,)  # type: ignore[arg-type]


def test_a_profile_is_frozen_all_the_way() -> None:
    rates = {"float32": 1e11}
    profile = replace(PROFILE, matmul_flops_per_s=rates)
    rates["float32"] = 1.0
    assert profile.matmul_flops_per_s == {"float32": 1e11}
    with pytest.raises(FrozenInstanceError):
        profile.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError, match="item assignment"):
        profile.matmul_flops_per_s["float32"] = 1.0  # type: ignore[index]
    assert len({PROFILE, copy.deepcopy(PROFILE), pickle.loads(pickle.dumps(PROFILE))}) == 1


def test_drives_add_up() -> None:
    assert (PROFILE.ssd_read_bytes_per_s, PROFILE.ssd_write_bytes_per_s, PROFILE.ssd_mixed_bytes_per_s) == (
        4e9,
        2e9,
        3e9,
    )
    without = replace(PROFILE, nvme=())
    assert (without.ssd_read_bytes_per_s, without.ssd_write_bytes_per_s, without.ssd_mixed_bytes_per_s) == (0, 0, 0)


def test_a_dtype_without_kernels() -> None:
    without = replace(PROFILE, matmul_flops_per_s={"float32": 1.2e11, "bfloat16": 1.3e9})
    assert without.lacks_kernels(torch.bfloat16) and not without.lacks_kernels(torch.float32)
    assert not PROFILE.lacks_kernels(torch.bfloat16)
    with pytest.raises(ValueError, match="float16"):
        without.lacks_kernels(torch.float16)


def test_matmul_rate() -> None:
    assert PROFILE.matmul_rate(torch.bfloat16) == 5e11
    with pytest.raises(ValueError, match=r"no matmul rate for torch.float16 .*'a box': it has torch.float32, torch.bf"):
        PROFILE.matmul_rate(torch.float16)


def test_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(PROFILE, machine=HardwareProfile.fingerprint())
    assert here.is_this_machine()
    assert not PROFILE.is_this_machine()
    assert not any(preset.is_this_machine() for preset in PRESETS.values())
    monkeypatch.setattr(machine, "cpu_cores", lambda: 3)
    assert not here.is_this_machine()


def test_is_outdated() -> None:
    measured = replace(PROFILE, measured_at="2026-11-25T20:10:38+00:00", versions={"measurement": MEASUREMENT})
    assert not measured.is_outdated()
    assert replace(measured, versions={"measurement": "0"}).is_outdated()
    assert replace(measured, versions={"torch": "2.13.0"}).is_outdated()  # of before there was such a number
    assert not replace(measured, measured_at="", versions={}).is_outdated()
    assert not any(preset.is_outdated() for preset in PRESETS.values())


def test_drives_at_requests_have_the_rates_between_those_of_the_measured_sizes() -> None:
    large = RequestRate(request_bytes=2**24, read_bytes_per_s=4e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2.5e9)
    measured, unmeasured = replace(DRIVE, by_request=(large, REQUEST)), replace(DRIVE, by_request=())
    profile = replace(PROFILE, nvme=(measured, unmeasured))
    for nbytes, rates in (
        (1, (2e9, 1e9, 1.5e9)),
        (2**20, (2e9, 1e9, 1.5e9)),
        (2**21, (2.5e9, 1.25e9, 1.75e9)),  # a quarter of the way from 1 to 16 MiB, over the logarithm
        (2**22, (3e9, 1.5e9, 2e9)),
        (2**24, (4e9, 2e9, 2.5e9)),
        (2**30, (4e9, 2e9, 2.5e9)),
    ):
        found = profile.at_requests(nbytes)
        drive = found.nvme[0]
        assert (drive.read_bytes_per_s, drive.write_bytes_per_s, drive.mixed_bytes_per_s) == pytest.approx(rates)
        assert found.nvme[1] == unmeasured
        assert found.ssd_read_bytes_per_s == pytest.approx(rates[0] + unmeasured.read_bytes_per_s)
        assert found.at_requests(nbytes) == found
