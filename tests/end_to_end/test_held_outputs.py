"""A loop that holds what the model returned, logits with the loss, stays within the promise."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx import returned_tensors
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.liveness import device_peak, outputs_bytes
from lohan_fx.plan import Plan
from tests.end_to_end.forwards_at_once import trained
from tests.end_to_end.models import LLAMA, tokens
from tests.end_to_end.recipes import LR, name_of, usual_dtype

PROMISES = {torch.float32: "500MiB", torch.bfloat16: "700MiB"}
"""Of which logits of 64 MiB leave no room for more than there has to be."""


@pytest.mark.parametrize("dtype", dict.fromkeys([torch.float32, usual_dtype()]), ids=name_of)
def test_held_logits_stay_within_the_promise(dtype: torch.dtype, tmp_path: Path) -> None:
    options = f"--host-memory {PROMISES[dtype]} --dtype {name_of(dtype)} --vocabulary 4096 --holds"
    held = trained(tmp_path, options)
    assert max(held["peaks"]) <= held["promised_bytes"]
    assert not held["warned_of_outputs"]
    uncounted = trained(tmp_path, f"{options} --loss-only")
    assert max(uncounted["peaks"]) > uncounted["promised_bytes"], (
        "they fit without any room for them: nothing is tested"
    )
    assert len(uncounted["warned_of_outputs"]) == 1
    assert held["losses"] == uncounted["losses"]


def _prepared(nvme: Path, hw: HardwareProfile, **options: Any) -> tuple[Plan, int, int]:
    """The plan, the peak of its graphs, and what they return."""
    model = LLAMA.build()
    wanted = {"compute_dtype": torch.float32, "host_memory": "2GiB", **options}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=nvme, **wanted)):
        plan = lohan_fx.prepare(model, **tokens())
        halves = compiled(model).halves[-1]
        return plan, device_peak(halves, plan), outputs_bytes(halves)


@pytest.mark.parametrize("policy", ["keep", "recompute", "lohan"])
def test_a_plan_has_room_for_what_a_call_returns(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    plan, peak, nbytes = _prepared(tmp_path, hw, policy=policy)
    alone, least, _ = _prepared(tmp_path, hw, policy=policy, loss_only=True)
    batch, length = tokens()["input_ids"].shape
    assert nbytes == batch * length * LLAMA.build().config.vocab_size * 4 + 4  # logits and the loss
    assert plan.outputs_bytes == alone.outputs_bytes == nbytes
    assert not plan.loss_only
    assert alone.loss_only
    assert least <= peak <= least + nbytes
    assert Plan.from_json(plan.to_json()) == plan


def test_forwards_that_wait_count_with_what_they_have_returned(hw: HardwareProfile, tmp_path: Path) -> None:
    one, peak, nbytes = _prepared(tmp_path, hw, policy="keep", loss_only=True)
    several, more, _ = _prepared(tmp_path, hw, policy="keep", loss_only=True, forwards=3)
    assert more == peak + 2 * (one.kept_bytes + nbytes)
    assert several.waiting_bytes == more - peak


@pytest.mark.parametrize(("holds", "warnings_expected"), [("outputs", 1), ("part", 1), ("loss", 0), ("nothing", 0)])
def test_whoever_holds_more_than_was_said_is_warned_once(
    holds: str, warnings_expected: int, hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returned_tensors, "NOTICEABLE_BYTES", 8)  # the loss has four
    model = LLAMA.build()
    options = {"compute_dtype": torch.float32, "host_memory": "2GiB", "loss_only": True}
    with (
        lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for _ in range(3):
            outputs = model(**tokens())
            held = {"outputs": outputs, "part": outputs.logits, "loss": outputs.loss, "nothing": None}[holds]
            loss = outputs.loss
            del outputs
            gc.collect()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del held
    assert len([one for one in warned if "loss_only=True" in str(one.message)]) == warnings_expected


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_a_bad_word_is_refused(wrong: Any, hw: HardwareProfile, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"loss_only is .*: expected True or False"):
        lohan_fx.compile(LLAMA.build(), hw, nvme=tmp_path, loss_only=wrong)
