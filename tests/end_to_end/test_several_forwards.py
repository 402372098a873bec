"""Several calls of a model before one backward, as contrastive losses make them: exact, and within the promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Swap, Tier
from lohan_fx.planning.disk_space import disk_bytes
from tests.end_to_end.forwards_at_once import trained
from tests.end_to_end.models import LLAMA, PERCEPTRON, tokens, vectors
from tests.end_to_end.recipes import LR, assert_same_weights, name_of, usual_dtype, weights_of

CALLS = 3
PROMISE = "600MiB"
USUAL_DTYPES = dict.fromkeys([torch.float32, usual_dtype()])


def _trained(nvme: Path, *, said: int, dtype: torch.dtype) -> dict[str, Any]:
    return trained(nvme, f"--host-memory {PROMISE} --calls {CALLS} --said {said} --dtype {name_of(dtype)}")


@pytest.mark.parametrize("dtype", USUAL_DTYPES, ids=name_of)
def test_what_several_forwards_keep_stays_within_the_promise(dtype: torch.dtype, tmp_path: Path) -> None:
    """From the first step on where it is said, else from the step after the first: the plan of one forward has no room for three,
    and what the first step took is given back in the second."""
    said = _trained(tmp_path, said=CALLS, dtype=dtype)
    assert max(said["peaks"]) <= said["promised_bytes"]
    assert not said["warned_of_forwards"]
    learned = _trained(tmp_path, said=1, dtype=dtype)
    assert learned["peaks"][0] > learned["promised_bytes"], (
        "three forwards fit without any plan for them: nothing is tested"
    )
    assert max(learned["peaks"][2:]) <= learned["promised_bytes"]
    assert len(learned["warned_of_forwards"]) == 1
    assert said["forwards"] == learned["forwards"] == CALLS
    assert said["losses"] == learned["losses"]


def _contrastive(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = F.triplet_margin_loss(*(model(**vectors()).prediction for _ in range(CALLS)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("policy", ["lohan", "swap-nvme"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_training_goes_on_exactly_when_plans_are_made_anew(
    max_norm: float | None, policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    def adamw(kind: Any, model: Any) -> Any:
        optimizer = kind(model.parameters(), lr=LR)
        if max_norm is not None:
            optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(model.parameters(), max_norm) and None)
        return optimizer

    plain, model = PERCEPTRON.build(), PERCEPTRON.build()
    torch.manual_seed(1)
    wanted = _contrastive(plain, adamw(torch.optim.AdamW, plain), 6)
    options = {"compute_dtype": torch.float32, "host_memory": "2GiB", "policy": policy}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, hold_gradients=max_norm is not None, **options)):
        torch.manual_seed(1)
        optimizer = adamw(lohan_fx.AdamW, model)
        found = _contrastive(model, optimizer, 3)
        assert [plan.forwards for plan in compiled(model).plans] == [1]
        compiled(model)._waiting.wanted = CALLS  # as if they had passed the promise, which they are too small for
        found += _contrastive(model, optimizer, 3)
        assert [plan.forwards for plan in compiled(model).plans] == [CALLS]
    assert found == wanted
    assert_same_weights(weights_of(model), weights_of(plain))


def test_what_they_swap_to_the_drives_has_its_places_before(hw: HardwareProfile, tmp_path: Path) -> None:
    model = PERCEPTRON.build()
    options = {"compute_dtype": torch.float32, "host_memory": "2GiB", "policy": "swap-nvme", "forwards": CALLS}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        plan, store = lohan_fx.prepare(model, **vectors()), compiled(model).engine.store
        allocated = store.nbytes_allocated
        assert plan.bytes_of(Swap(Tier.NVME)) and allocated >= disk_bytes(plan)
        _contrastive(model, lohan_fx.AdamW(model.parameters(), lr=LR), 1)
        assert store.nbytes_allocated == allocated


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("policy", ["keep", "swap-host", "swap-nvme"])
def test_a_forward_waits_for_its_backward_or_until_it_is_gone(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    model = PERCEPTRON.build()
    options = {"compute_dtype": torch.float32, "host_memory": "2GiB", "policy": policy}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        waiting, updates = compiled(model)._waiting, compiled(model).engine.updates

        def count() -> int:
            return len(waiting.of(updates.finished))

        with torch.no_grad():
            kept = model(**vectors())
        assert count() == 0
        losses = [model(**vectors()).loss for _ in range(3)]
        assert count() == 3
        losses.pop()
        assert count() == 2
        optimizer.zero_grad()  # as many loops do it, between forward and backward
        assert count() == 2
        sum(losses).backward()
        assert count() == 0
        losses.append(model(**vectors()).loss)
        assert count() == 1
        optimizer.step()
        assert count() == 0
        del kept, losses


def test_training_goes_on_where_no_plan_has_room_for_what_was_seen(hw: HardwareProfile, tmp_path: Path) -> None:
    """Over the promise, as the first step was, and with a warning."""
    plain, model = PERCEPTRON.build(), PERCEPTRON.build()
    torch.manual_seed(1)
    wanted = _contrastive(plain, torch.optim.AdamW(plain.parameters(), lr=LR), 4)
    options = {"compute_dtype": torch.float32, "host_memory": "200MiB", "policy": "keep"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        torch.manual_seed(1)
        found = _contrastive(model, optimizer, 2)
        compiled(model)._waiting.wanted = 1 << 20
        with pytest.warns(UserWarning, match="no plan has room for the 1048576 forwards"):
            found += _contrastive(model, optimizer, 1)
        found += _contrastive(model, optimizer, 1)
        assert [plan.forwards for plan in compiled(model).plans] == [1]
    assert found == wanted


def test_another_call_that_does_not_fit_is_not_blamed_on_the_forwards(hw: HardwareProfile, tmp_path: Path) -> None:
    model = PERCEPTRON.build()
    options = {"compute_dtype": torch.float32, "host_memory": "200MiB"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        _contrastive(model, optimizer, 1)
        compiled(model)._waiting.wanted = CALLS
        _contrastive(model, optimizer, 1)
        with pytest.raises(InfeasiblePlan, match="without gradients"), torch.no_grad():
            model(torch.ones(1 << 20, 24), torch.ones(1 << 20, 8))
        _contrastive(model, optimizer, 1)
        assert compiled(model).plans[0].forwards == CALLS


def test_a_policy_that_keeps_everything_is_refused_by_number(hw: HardwareProfile, tmp_path: Path) -> None:
    model = LLAMA.build()
    options = {"compute_dtype": torch.float32, "host_memory": "200MiB", "policy": "keep", "forwards": 2000}
    with (
        lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)),
        pytest.raises(InfeasiblePlan, match="The graphs of 2000 forwards alone need"),
    ):
        model(**tokens())


@pytest.mark.parametrize("forwards", [0, -1, 1.5, True, "2", None])
def test_a_bad_number_is_refused(forwards: Any, hw: HardwareProfile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"forwards is .*: expected how many wait"):
        lohan_fx.compile(LLAMA.build(), hw, nvme=tmp_path, forwards=forwards)
