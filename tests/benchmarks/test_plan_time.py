"""plan_time: a command is measured as a process of its own, and each bar can be missed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig

from lohan_fx.models.model_families import build, model_from_config
from lohan_fx.models.model_presets import named

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def plan_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("plan_time")


def answer(wall_s: float = 30.0, gigabytes: float = 1.0) -> dict[str, float]:
    return {"wall_s": wall_s, "processor_s": wall_s, "peak_rss_bytes": gigabytes * 1e9}


def test_what_a_command_takes_is_its_own(plan_time: ModuleType) -> None:
    code = "import time; block = bytearray(600 << 20); time.sleep(0.2)"
    found = plan_time.measured([sys.executable, "-c", code])
    assert found["wall_s"] > 0.2 and found["processor_s"] > 0
    assert found["peak_rss_bytes"] > 600 << 20
    with pytest.raises(subprocess.CalledProcessError):
        plan_time.measured([sys.executable, "-c", "raise SystemExit(2)"])


def test_the_models_of_other_depths_are_the_preset_otherwise(plan_time: ModuleType) -> None:
    config = plan_time.config(2)
    model = model_from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    assert model.config.to_dict() == build(named(plan_time.MODEL), layers=2).config.to_dict()


def test_medians_of_seconds_and_the_most_of_memory_count(plan_time: ModuleType) -> None:
    assert plan_time.together([answer(1.0, 3.0), answer(5.0, 1.0), answer(2.0, 2.0)]) == answer(2.0, 3.0)


def test_every_bar_can_be_missed(plan_time: ModuleType) -> None:
    depths = [{"layers": 12, **answer(10.0)}, {"layers": 96, **answer(40.0)}]
    figures, missed = plan_time.judged(answer(), depths)
    assert (figures["layers_ratio"], figures["wall_ratio"], missed) == (8.0, 4.0, [])
    slow = [depths[0], {"layers": 96, **answer(41.0)}]
    for asked, bar in (
        ((answer(180.0), depths), "gpt3-175b takes 180 s: expected less than 180"),
        ((answer(30.0, 8.0), depths), "gpt3-175b takes 8.0 GB: expected less than 8"),
        ((answer(), slow), "8x the layers take 4.10x the seconds: expected at most 4x"),
    ):
        assert plan_time.judged(*asked)[1] == [bar]
    assert plan_time.judged(answer(), depths[:1])[1] == []
