"""The hardware profile's file: it keeps everything, and what is wrong in it is refused with the file's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.hardware import DTYPES, HardwareProfile, NvmeProfile, Prices, RequestRate
from lohan_fx.presets import PRESETS

PROFILE = replace(
    PRESETS["rtx4090-1xP5510"],
    h2d_bytes_per_s=1e10,
    device_memory_bytes=2**34,
    nvme=(NvmeProfile("/nvme", 2e9, 1e9, 1.5e9, 10**12, (RequestRate(2**20, 2e9, 1e9, 1.5e9),)),),
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
rates = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
sizes = st.integers(min_value=1, max_value=2**63 - 1)
requests = st.builds(RequestRate, sizes, rates, rates, rates)
drives = st.builds(NvmeProfile, texts, rates, rates, rates, sizes, st.lists(requests, max_size=3).map(tuple))
profiles = st.builds(
    HardwareProfile,
    **dict.fromkeys(("name", "device_name", "cpu_name"), names),
    **dict.fromkeys(("cpu_cores", "device_memory_bytes", "host_memory_bytes"), sizes),
    **dict.fromkeys(("memory_bytes_per_s", "host_memory_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"), rates),
    **dict.fromkeys(("adam_parameters_per_s", "op_overhead_s"), rates),
    device=st.sampled_from(["cpu", "cuda"]),
    matmul_flops_per_s=st.dictionaries(st.sampled_from(DTYPES), rates, min_size=1),
    nvme=st.lists(drives, max_size=3).map(tuple),
    measured_at=st.just("") | st.datetimes().map(lambda moment: moment.isoformat()),
    versions=st.dictionaries(texts, texts, max_size=3),
    machine=texts,
    prices=st.none() | st.builds(Prices, rates, rates, rates),
)


@settings(max_examples=60)
@given(profile=profiles)
def test_a_file_gives_back_what_was_saved(profile: HardwareProfile, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("profiles", numbered=True) / "hw.toml"
    profile.save(path)
    assert HardwareProfile.load(path) == profile


def test_a_file_tells_units_and_groups_digits(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "hw.toml")
    lines = (tmp_path / "hw.toml").read_text().splitlines()
    assert "h2d_bytes_per_s = 10_000_000_000.0 # bytes/s, host to device" in lines
    assert "device_memory_bytes = 17_179_869_184 # bytes" in lines
    assert "[matmul_flops_per_s] # flop/s of a large square matmul (2 n^3 flop), by dtype" in lines


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("format = 1\n", "format = 2\n", ValueError, "format is 2, newer than the 1"),
        ("format = 1\n", "", ValueError, "format is None: expected 1; is this a hardware profile"),
        ("format = 1\n", 'format = "1"\n', ValueError, "format is '1': expected 1"),
        ("cpu_cores", "cpu_coers", ValueError, "keys of the profile: unknown 'cpu_coers'; missing 'cpu_cores'"),
        ("capacity_bytes", "capacity", ValueError, "keys of nvme 1 of the profile: unknown 'capacity'; missing 'cap"),
        ("request_bytes =", "size =", ValueError, "keys of by_request 1 of nvme 1 of the profile: unknown 'size'"),
        ("gpu_usd", "card_usd", ValueError, "keys of prices of the profile: unknown 'card_usd'; missing 'gpu_usd'"),
        ("= 10_000_000_000.0", "= -1.0", ValueError, "HardwareProfile.h2d_bytes_per_s is -1.0"),
        ("= 10_000_000_000.0", "= nan", ValueError, "HardwareProfile.h2d_bytes_per_s is nan"),
        ("= 10_000_000_000.0", '= "10 GB/s"', TypeError, "HardwareProfile.h2d_bytes_per_s is '10 GB/s'"),
        ("[[nvme]]", "[nvme]", TypeError, r"nvme of the profile is \{.*: expected \[\[nvme\]\] tables"),
        ("[prices]", "[[prices]]", TypeError, r"prices of the profile is \[.*: expected a table"),
        ("device = ", "device ", ValueError, "Expected '='"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "hw.toml"
    PROFILE.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(error, match=message) as caught:
        HardwareProfile.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no hardware profile at .*hw.toml: HardwareProfile.measure\(...\)"):
        HardwareProfile.load(tmp_path / "hw.toml")


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "hw.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"hw.toml: 'utf-8' codec"):
        HardwareProfile.load(tmp_path / "hw.toml")
