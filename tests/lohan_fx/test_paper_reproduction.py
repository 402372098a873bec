"""What LoHan prints about 13B at batch 32, from its formula alone: constants are set F2 of mechanisms d2.

They were fixed by other numbers of the paper: the peak by shares of it, the drives by 364 GB in 13 s, the link by 213 GiB
in a forward of which computing takes 59 %.
"""

from __future__ import annotations

import itertools

import pytest

from lohan_fx.cost_models import g10, lohan
from lohan_fx.models.model_presets import named
from lohan_fx.models.transformer_counts import TransformerCounts

PEAK, DRIVES, LINK = 164.2e12, 28e9, 22.6e9


def thirteen(batch: int) -> TransformerCounts:
    return TransformerCounts(named("gpt3-13b"), batch, 1024)


def step_s(c: TransformerCounts, swapped: float, recomputed: float) -> float:
    return lohan.OF_A_MODEL.seconds(
        {
            "FLOP_f": c.forward_flops,
            "FLOP_r": recomputed,
            "THP_G": PEAK,
            "P": c.dims.parameters,
            "A_G2M": swapped,
            "MEM_avail": 0.0,
            "BW_G": LINK,
            "BW_S2M": DRIVES,
            "BW_M2S": DRIVES,
            "ADAM": 5e9,
            "BW_M": 246e9,
        }
    )


def steps(c: TransformerCounts) -> list[tuple[float, float, float]]:
    """(bytes swapped, FLOPs recomputed, seconds) at A_interBlock and after each layer, best first."""
    swapped, recomputed = c.inter_block_bytes, c.forward_flops
    found = [(swapped, recomputed, step_s(c, swapped, recomputed))]
    for layer in sorted(c.block_layers, key=lambda layer: -layer.benefit):
        for _ in range(c.dims.layers):
            swapped, recomputed = swapped + layer.bytes, recomputed - layer.flops
            found.append((swapped, recomputed, step_s(c, swapped, recomputed)))
    return found


def fastest(c: TransformerCounts) -> tuple[float, float, float]:
    return min(steps(c), key=lambda step: step[2])


def test_what_is_swapped_and_recomputed_at_batch_32() -> None:
    """L-ME-10: 34 GB and 32 % more computing in the backward. The first is ill-conditioned (d2); its step is not."""
    c = thirteen(32)
    swapped, recomputed, seconds = fastest(c)
    assert swapped == pytest.approx(34e9, rel=0.1)
    assert recomputed / (2 * c.forward_flops) == pytest.approx(0.32, rel=0.03)
    near = min(steps(c), key=lambda step: abs(step[0] - 34e9))
    assert near[2] == pytest.approx(seconds, rel=0.01)
    assert 3 * c.forward_flops / seconds / 1e12 == pytest.approx(135, rel=0.01)


@pytest.mark.parametrize(("batch", "case"), [(24, 1), (36, 3), (48, 3), (60, 3)])
def test_cases_of_figure_9b(batch: int, case: int) -> None:
    """L-ME-20: 1 where the least that must be swapped is best, 3 inside, 2 at all."""
    c = thirteen(batch)
    swapped = fastest(c)[0]
    assert {c.inter_block_bytes: 1, c.all_bytes: 2}.get(swapped, 3) == case


@pytest.mark.parametrize("batch", [24, 32, 36, 48, 60])
def test_steps_are_convex_along_the_order_of_benefit(batch: int) -> None:
    """LoHan's theorem 4: slopes never fall."""
    found = steps(thirteen(batch))
    slopes = [(b[2] - a[2]) / (b[0] - a[0]) for a, b in itertools.pairwise(found)]
    assert all(later >= earlier - 1e-16 for earlier, later in itertools.pairwise(slopes))


def test_g10s_optimizer_stage() -> None:
    """L-ES-06: 13 s for 182 GB each way, 37 % of the step; computing at what training reached (5.96 s, L-ES-07)."""
    c = thirteen(32)
    values = {"FLOP_f": c.forward_flops, "THP_G": c.forward_flops / 5.96, "P": c.dims.parameters}
    values |= {"A_all": c.all_bytes, "BW_G": LINK, "BW_S2M": DRIVES, "BW_M2S": DRIVES, "BW_GPU_MEM": 907e9}
    stages = g10.SEPARATE.stage_seconds(values)
    assert stages["optimizer"] == pytest.approx(13, rel=0.02)
    assert stages["optimizer"] / sum(stages.values()) == pytest.approx(0.37, rel=0.02)
