"""The numbers are those of plain PyTorch: every loss and every weight, for each family of models and each policy."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Keep, Plan, Recompute, Swap, Tier
from lohan_fx.planning import staging
from lohan_fx.planning.budgets import choose_windows, fixed_bytes, parse_bytes
from tests.end_to_end.models import CASES, GPT2, T5, Case
from tests.end_to_end.recipes import Run, assert_same, plain, plain_bf16, streamed, weights_of
from tests.exhaustive import some_of

pytestmark = pytest.mark.usefixtures("leak_check")

FORCED = ("in-memory", "keep", "swap-host", "swap-nvme", "recompute")
OFTEN = {
    "gpt2": FORCED,
    "llama": ("swap-nvme", "recompute"),
    "opt": ("keep", "recompute"),
    "vit": ("swap-host", "recompute"),
    "dit": ("swap-nvme", "swap-host"),
}
"""The forced policies that each family is usually tried with."""
LOOSE = "700MiB"
OFTEN_BF16 = {"gpt2": ("swap-nvme",), "llama": ("recompute",), "opt": (), "vit": ("recompute",), "dit": ("swap-nvme",)}
T5_AS = (("recompute", torch.float32), ("swap-nvme", torch.bfloat16))
BF16_STEP = 2**-7
"""Tracing rounds to bf16 in other places than eager does. Losses, which ViT rounds to bf16, agree to one step of it."""
BF16_SHARE = 0.2
"""How far from eager's the final weights may be, as a share of the way that eager has moved them."""

plain_once = functools.cache(plain)
plain_bf16_once = functools.cache(plain_bf16)


def _matrix(often: Mapping[str, Collection[str]], policies: Sequence[str] = FORCED) -> list[Any]:
    return [
        pytest.param(case, policy, id=f"{case}-{policy}")
        for case in CASES
        for policy in some_of(policies, often[case.name])
    ]


@pytest.mark.parametrize(("case", "policy"), _matrix(OFTEN))
def test_forced_policies_are_bit_equal_to_eager(case: Case, policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    found = streamed(case, hw, tmp_path, policy=policy)
    assert_same(found, plain_once(case))
    assert _does(found.plan, policy)


@pytest.mark.parametrize(("policy", "dtype"), some_of(T5_AS, T5_AS[:1]))
def test_an_encoder_with_a_decoder(policy: str, dtype: torch.dtype, hw: HardwareProfile, tmp_path: Path) -> None:
    """T5: a shared embedding, positions as a bias, and constants in the graph, recomputed as all else is."""
    found = streamed(T5, hw, tmp_path, dtype=dtype, policy=policy)
    assert_same(found, plain(T5) if dtype is torch.float32 else plain_bf16(T5, backend="aot_eager"))
    assert _does(found.plan, policy)


@pytest.mark.usefixtures("little_is_small")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_searched_plans_are_bit_equal_to_eager(case: Case, hw: HardwareProfile, tmp_path: Path) -> None:
    loose = streamed(case, hw, tmp_path, host_memory=LOOSE)
    assert_same(loose, plain_once(case))
    assert _does(loose.plan, "in-memory")
    torch._dynamo.reset()
    tight = streamed(case, hw, tmp_path, host_memory=_tight(loose))
    assert_same(tight, plain_once(case))
    assert tight.plan is not None and tight.plan.prediction is not None
    assert tight.plan.prediction.recompute_flops > 0 or tight.plan.prediction.nvme_write_bytes > 0
    assert {p.home for p in tight.plan.parameters} == {Tier.DEVICE, Tier.NVME}


@pytest.mark.usefixtures("little_is_small")
def test_the_promise_that_a_refusal_names_is_enough_and_exact(
    hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = _fixed_bytes(len(list(GPT2.build().parameters()))) + 4096
    assert_same(streamed(GPT2, hw, tmp_path, host_memory=little), plain_once(GPT2))  # by smaller requests
    torch._dynamo.reset()
    monkeypatch.setattr(staging, "smallest", lambda windows, **_: windows)
    with pytest.raises(InfeasiblePlan) as refused:
        streamed(GPT2, hw, tmp_path, host_memory=little)
    named = re.search(r"host_memory=([\d,]+) would fit", str(refused.value))
    assert named is not None
    assert_same(streamed(GPT2, hw, tmp_path, host_memory=int(named[1].replace(",", ""))), plain_once(GPT2))


@pytest.mark.parametrize(("case", "policy"), _matrix(OFTEN_BF16, ("swap-nvme", "recompute")))
def test_bf16_is_bit_equal_to_the_recipe_traced_and_close_to_eager(
    case: Case, policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    found = streamed(case, hw, tmp_path, dtype=torch.bfloat16, policy=policy)
    assert_same(found, plain_bf16_once(case, backend="aot_eager"))
    _assert_close(found, plain_bf16_once(case), case)


def _assert_close(found: Run, eager: Run, case: Case) -> None:
    assert found.losses == pytest.approx(eager.losses, rel=BF16_STEP)
    start = weights_of(case.build())
    travelled = _distance(eager.weights, start)
    assert _distance(found.weights, eager.weights) <= BF16_SHARE * travelled


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[name] - b[name]).double().square().sum()) for name in b) ** 0.5


def _does(plan: Plan | None, policy: str) -> bool:
    """Whether ``plan`` does what the forced ``policy`` says, so that no case passes by doing something else."""
    assert plan is not None and plan.prediction is not None
    home = Tier.DEVICE if policy == "in-memory" else Tier.NVME
    saved = {"swap-host": Swap(Tier.HOST), "swap-nvme": Swap(Tier.NVME)}.get(policy, Keep())
    # What is dropped because nothing reads it is planned Recompute too.
    done = {a.decision for a in plan.activations} == {saved, Recompute()}
    recomputes = plan.prediction.recompute_flops > 0
    return done and recomputes == (policy == "recompute") and all(p.home is home for p in plan.parameters)


def _fixed_bytes(parameters: int) -> int:
    """Host memory that is spent whatever the plan, where little is promised."""
    return fixed_bytes(choose_windows(parse_bytes(LOOSE, "host_memory"), []), parameters, shared=True)


def _tight(loose: Run) -> int:
    """Two thirds of what is used where there is plenty, the fixed part aside."""
    assert loose.plan is not None and loose.plan.prediction is not None
    fixed = _fixed_bytes(len(loose.plan.parameters))
    return fixed + 2 * (loose.plan.prediction.peak_bytes["host"] - fixed) // 3
