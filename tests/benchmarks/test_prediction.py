"""What a prediction is held against: bytes of every kind, and a share of however many cases there are."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.cost import Work
from lohan_fx.planning.predict import predict
from tests.end_to_end.models import GPT2_SHALLOW
from tests.end_to_end.recipes import cpu_profile

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EXACT = {
    "bytes": [8192.0, 4096.0],
    "predicted_bytes": [8192, 4096],
    "simulated_bytes": [8000, 4000],
    "padding_bytes": [192, 96],
    "link_bytes": [10.0, 20.0],
    "predicted_link_bytes": [10, 20],
    "simulated_link_bytes": [10, 20],
}


@pytest.fixture
def prediction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("prediction")


def judged(prediction: ModuleType, **changes: Any) -> dict[str, Any]:
    """The first case, measured in a pass of one second a step."""
    figures = {"predicted_s": 1.0, "simulated_s": 1.0, "drift": 0.0, "stolen": 0.0, "seconds": [1.0]}
    memory = dict.fromkeys(("planned_peak_rss_bytes", "predicted_peak_rss_bytes", "peak_rss_bytes"), 1e9)
    found = prediction.judged(prediction.CASES[0], [{"passes": [{**figures, **EXACT, **changes}], **memory}])
    assert isinstance(found, dict)
    return found


def test_bytes_as_foretold_miss_nothing(prediction: ModuleType) -> None:
    case = judged(prediction)
    assert case["bytes_exact"] and case["bytes_differ"] == []
    assert prediction._missed([case]) == []


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("predicted_bytes", "NVMe by formula"),
        ("simulated_bytes", "NVMe by simulator"),
        ("predicted_link_bytes", "copies by formula"),
        ("simulated_link_bytes", "copies by simulator"),
        ("bytes", "NVMe by formula, NVMe by simulator"),
        ("link_bytes", "copies by formula, copies by simulator"),
    ],
)
def test_one_byte_more_of_any_kind_is_missed_and_named(prediction: ModuleType, key: str, names: str) -> None:
    first, second = EXACT[key]
    for wrong in ([first + 1, second], [first, second + 1]):
        case = judged(prediction, **{key: wrong})
        assert not case["bytes_exact"]
        assert prediction._missed([case]) == [f"{case['case']}: bytes differ: {names}"]
        assert prediction._row(case)[1].endswith(f"bytes DIFFER: {names}")


def test_five_of_six_cases_are_within_ten_per_cent_however_many_there_are(prediction: ModuleType) -> None:
    exact, off = judged(prediction), judged(prediction, predicted_s=1.15)
    for count, most in ((12, 2), (13, 2), (6, 1), (1, 0)):
        assert prediction._missed([off] * most + [exact] * (count - most)) == []
        missed = prediction._missed([off] * (most + 1) + [exact] * (count - most - 1))
        assert missed == [f"step time within 10% in {count - most - 1} of {count} cases"]


def test_a_cpu_copies_what_is_swapped_and_not_what_comes_from_a_drive(prediction: ModuleType) -> None:
    none = dict.fromkeys((field.name for field in dataclasses.fields(Work) if field.default is dataclasses.MISSING), 0)
    moved = {
        "swapped_bytes": 100,
        "swapped_nvme_bytes": 30,
        "gradient_bytes": 1000,
        "fetched_forward_bytes": 200,
        "fetched_forward_nvme_bytes": 200,
        "fetched_backward_bytes": 400,
        "fetched_backward_nvme_bytes": 395,
    }
    assert prediction.link_bytes(Work(**{**none, **moved}), cpu_profile()) == [70 + 5, 100]


def test_what_is_predicted_again_is_what_was_planned(prediction: ModuleType, tmp_path: Path) -> None:
    """What a graph itself leaves in memory does not count as another's."""
    hw, model = cpu_profile(), GPT2_SHALLOW.build()
    options = {"nvme": tmp_path, "host_memory": "2GiB", "compute_dtype": torch.float32, "dynamic": False}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, **options)):
        for length in (8, 12):  # the second one's plan has the first one's graphs beside it
            tokens = torch.zeros(1, length, dtype=torch.int64)
            plan = lohan_fx.prepare(model, input_ids=tokens, labels=tokens)
            again = predict(compiled(model).halves[-1], plan, prediction.request_by(model, hw))
            assert plan.prediction is not None
            assert again.step_s == plan.prediction.step_s
            assert 0 < again.peak_bytes["host"] <= plan.prediction.peak_bytes["host"]
        assert len(compiled(model).plans) == 2


def test_the_cases_have_a_diffusion_transformer_that_trains(
    prediction: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = importlib.import_module("workload")
    sizes = [case.size for case in prediction.CASES]
    assert [size for size in sizes if size in workload.DIT_SIZES] == ["dit-77m"]
    monkeypatch.setitem(workload.DIT_SIZES, "dit-tiny", (2, 32, 2))
    tiny = workload.Workload("dit-tiny", 2, 16, dtype="float32")
    model, inputs = tiny.build(), tiny.inputs()
    assert inputs["latents"].shape == (2, 4, 8, 8)
    assert all(torch.equal(value, inputs[name]) for name, value in tiny.inputs().items())
    loss = model(**inputs).loss
    loss.backward()
    assert loss.isfinite()
    # Of the embedding only the rows of this batch's classes.
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    with pytest.raises(ValueError, match="a DiT over 17 tokens: a square of patches has 16 or 25"):
        workload.Workload("dit-tiny", 2, 17).inputs()
