"""The comparison with other systems: as a program, with a model that trains in a moment; and when it refuses to tell."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lohan_fx.hardware import NvmeProfile
from tests.tiny import profile

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ["--model-size", "tiny", "--layers", "1", "--hidden", "64", "--batch", "2", "--seq", "16"]
TIMEOUT_S = 500


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers")


@pytest.mark.slow
def test_against_plain_pytorch_from_end_to_end(peers: ModuleType, tmp_path: Path) -> None:
    path = Path(os.environ.get("LOHAN_FX_PEERS", str(peers.DEFAULT_PATH)))
    if not path.exists():
        pytest.skip(f"the peer harness is not at {path}: name it with LOHAN_FX_PEERS")
    drive = NvmeProfile("", 1e9, 1e9, 1e9, capacity_bytes=1 << 30)
    profile(nvme=(drive,), machine="").save(tmp_path / "hw.toml")
    nvme = tmp_path / "nvme"
    options = ["--harness", str(path), "--systems", "plain", "--rounds", "1", "--steps", "1", "--host-memory", "256MiB"]
    run = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "peers.py"),
            *SMALL,
            *options,
            "--nvme",
            str(nvme),
            "--hw",
            str(tmp_path / "hw.toml"),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert run.returncode == 0, run.stderr
    (case,) = json.loads(run.stdout.strip().splitlines()[-1])["cases"]
    systems = case["systems"]
    assert set(systems) == {"plain", "lohan_fx"}
    plain, ours = systems["plain"], systems["lohan_fx"]
    assert len(plain["losses"]) == 3 and plain["losses"] == pytest.approx(ours["losses"][:3], rel=peers.TOLERANCE)
    assert len(set(plain["losses"])) == 3  # it trained
    (run,) = ours["rounds"]
    assert 0 <= run["nvme_states_bytes"] <= run["states_bytes"] and run["states_bytes"] > 0
    for found in systems.values():
        assert found["tokens_per_s"] == pytest.approx(2 * 16 / found["s_per_step"])
        assert 100e6 < found["peak_rss_bytes"] < 2e9
    assert case["ratios"] == {"plain": pytest.approx(ours["tokens_per_s"] / plain["tokens_per_s"])}
    assert list(nvme.iterdir()) == []


def test_no_speed_is_told_where_losses_differ(peers: ModuleType) -> None:
    near = 10.0 * (1 + 0.9 * peers.TOLERANCE)
    peers.check_losses("case", {"plain": [10.0, 9.0, 8.0], "lohan_fx": [near, 9.0]})
    for wrong in (10.0 * (1 + 1.1 * peers.TOLERANCE), float("nan")):
        with pytest.raises(SystemExit, match=r"losses of step 1 differ by more than 0\.20%[\s\S]*10\.00000 plain"):
            peers.check_losses("case", {"plain": [9.0, 10.0], "lohan_fx": [9.0, wrong]})


def test_bars_and_limits(peers: ModuleType) -> None:
    case = peers.Case(peers.Model("350m", 4, 512), 0.5, "plain", bars={"plain": 0.9, "zero_offload": 1.0})
    assert case.model.options() == ["--model-size", "350m", "--batch", "4", "--seq", "512"]
    systems = {"plain": {"peak_rss_bytes": 8_000}, "lohan_fx": {"peak_rss_bytes": 4_000}}
    assert peers.missed(case, systems, {"plain": 0.9}) == []
    systems["lohan_fx"]["peak_rss_bytes"] = 4_001
    assert len(peers.missed(case, systems, {"plain": 0.89, "zero_offload": 0.99})) == 3


def test_each_case_tells_where_our_states_were(peers: ModuleType) -> None:
    traffic = peers.traffic
    assert traffic({"nvme_read_bytes": 0, "nvme_written_bytes": 0}) == "nothing on NVMe: all states in memory"
    moved = {"nvme_read_bytes": 5_671_000_000, "nvme_written_bytes": 5_432_000_000}
    told = "5.7 GB read and 5.4 GB written on NVMe per step; "
    assert traffic(moved) == f"{told}how much of it for states was not saved"
    states = {"states_bytes": 4_488_000_000, "nvme_states_bytes": 4_100_000_000}
    assert traffic({**moved, **states}) == f"{told}4.1 of 4.5 GB of states on NVMe"
    run = {**moved, "stages_s": {"forward": 1.0}, "predicted_s": 2.0}
    ours = {"s_per_step": 1.0, "tokens_per_s": 1.0, "peak_rss_bytes": 1, "rounds": [run]}
    case = {"config": "one", "systems": {"lohan_fx": ours}, "ratios": {}}
    assert ("  NVMe", traffic(run)) in list(peers.rows(case))


def test_without_deepspeed_it_says_how_to_install_it(
    peers: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")  # a Python whose find_spec found nothing
    python.chmod(0o755)
    harness = peers.Harness(tmp_path / "peer_bench.py", str(python), tmp_path)
    assert harness.available(["plain", "zero_offload", "zero_infinity+ckpt"]) == ["plain"]
    told = capfd.readouterr().err
    assert "left out: zero_offload, zero_infinity+ckpt" in told and "pip install --no-deps deepspeed==0.19.8" in told
