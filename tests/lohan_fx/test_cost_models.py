"""cost_models: the papers' equations against numbers by hand, their slopes, binding terms and printed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx import cost
from lohan_fx.cost_models import fuyou, g10, gemini, lohan, lsp_offload, zero_infinity, zero_offload
from lohan_fx.cost_models.formula import Combine, CostModel, StageFormula, Term, symbols
from lohan_fx.hardware import HardwareProfile

MODELS = [
    lohan.LITERAL,
    lohan.CORRECTED,
    lohan.OF_A_MODEL,
    lohan.DRIVES,
    fuyou.OVERLAPPED,
    fuyou.NOT_OVERLAPPED,
    zero_infinity.MODEL,
    zero_offload.MEASURED,
    zero_offload.LSP_EQ1,
    lsp_offload.MODEL,
    g10.SEPARATE,
    g10.OVERLAPPED,
    gemini.MODEL,
]
LOHAN = {
    "FLOP_f": 60.0,
    "FLOP_r": 20.0,
    "THP_G": 10.0,
    "P": 5.0,
    "A_G2M": 30.0,
    "MEM_avail": 10.0,
    "BW_G": 2.0,
    "BW_S2M": 4.0,
    "BW_M2S": 5.0,
    "ADAM": 1.0,
    "BW_M": 1.0,
}
FUYOU = {
    "T_f_comp": 10.0,
    "RC": 6.0,
    "T_o_comp": 3.0,
    "p": 1.0,
    "D_f": 4.0,
    "BW_GPU": 2.0,
    "BW_S2C": 1.0,
    "BW_C2S": 0.5,
    "N": 2.0,
}
SECONDS = ("RC", "T_f_comp", "T_o_comp")  # those that do not end in _s
RATES = ("THP", "BW_", "ADAM", "bytes_per_s", "parameters_per_s")


def a_rate(name: str) -> bool:
    return any(part in name for part in RATES) or name == "N"


def a_time(name: str) -> bool:
    named = name in SECONDS or name.endswith("_s") or name.startswith(("io_core_s_per_", "interpreter_s_per_", "T_"))
    return named and not a_rate(name)


def values_of(model: CostModel, number: float = 3.0) -> dict[str, float]:
    return dict.fromkeys(model.names, number)


def test_lohan_as_printed_by_hand() -> None:
    assert lohan.LITERAL.evaluate(LOHAN) == {
        "forward": {"compute": 6.0, "d2h": 15.0, "h2d": 5.0, "ssd": 2.5 + 20 / 5},
        "backward": {"compute": 14.0, "d2h": 5.0, "h2d": 20.0, "ssd": (70 + 20) / 4 + 70 / 5},
    }
    assert lohan.LITERAL.seconds(LOHAN) == 15.0 + 36.5
    assert lohan.LITERAL.binding(LOHAN) == {"forward": "d2h", "backward": "ssd"}


def test_as_printed_what_fits_in_memory_makes_the_drives_faster_corrected_it_does_not() -> None:
    ample = {**LOHAN, "MEM_avail": 50.0}
    assert lohan.LITERAL.evaluate(ample)["forward"]["ssd"] == 2.5 - 20 / 5
    assert lohan.OF_A_MODEL.evaluate(ample)["forward"]["ssd"] == 2.5


def test_corrected_has_the_processors_term() -> None:
    corrected = lohan.OF_A_MODEL.evaluate(LOHAN)
    assert corrected["backward"].pop("cpu") == 32 * 5.0
    assert corrected["forward"].pop("cpu") == 0.0
    assert corrected["forward"].pop("fetches") == 10 / 4
    assert corrected["backward"].pop("updates") == pytest.approx(60 / 4 + 70 / 5)
    literal = lohan.LITERAL.evaluate(LOHAN)
    assert corrected == {stage: pytest.approx(lanes) for stage, lanes in literal.items()}


def test_fuyou_by_hand() -> None:
    assert fuyou.OVERLAPPED.evaluate(FUYOU) == {
        "forward": {"compute": 10.0, "h2d": 1.0, "d2h": 2.0, "ssd": 1.0 + 4.0},
        "backward": {"compute": 26.0, "cpu": 3.0, "d2h": 1.0, "h2d": 3.0, "ssd": 9.0 + 14.0},
    }
    assert fuyou.OVERLAPPED.seconds(FUYOU) == 36.0
    assert fuyou.NOT_OVERLAPPED.seconds(FUYOU) == 10.0 + 26.0 + 21.0


def test_overlap_saves_the_gradients_round_trip() -> None:
    """F-ES-01: 2p written and 2p read."""
    ssd = {
        model.name: sum(lanes.get("ssd", 0.0) for lanes in model.evaluate({**FUYOU, "BW_C2S": 1.0}).values())
        for model in (fuyou.OVERLAPPED, fuyou.NOT_OVERLAPPED)
    }
    assert ssd["Fuyou without overlapping"] - ssd["Fuyou"] == 4 * FUYOU["p"] / 2


def test_fuyou_swaps_while_the_gpu_binds() -> None:
    """Slack 26 - 23 = 3 s at 1 byte/s: up to 3 bytes beyond D_start; the better layer first, the third is too much."""
    layers = [fuyou.SwapLayer(1.0, 1.0), fuyou.SwapLayer(2.0, 4.0), fuyou.SwapLayer(1.0, 0.5)]
    assert fuyou.slack_seconds(FUYOU) == 3.0
    assert fuyou.most_swapped_bytes(FUYOU) == 4.0 + 3.0
    # The backward falls from 26 s to 22 s of GPU but then waits 24 s for the drives.
    assert fuyou.schedule_swaps(FUYOU, layers[1:2]) == (6.0, 10.0 + 24.0)
    assert fuyou.schedule_swaps({**FUYOU, "RC": 0.0}, layers) == (4.0, 10.0 + 23.0)


def test_zero_infinity_by_hand() -> None:
    values = {"FLOP_f": 60.0, "FLOP_r": 20.0, "THP_G": 10.0, "P": 1.0, "A_inter": 4.0, "BW_G": 2.0, "BW_PAGE": 1.0}
    values |= {"BW_SSD": 0.5, "BW_OPT": 2.0, "ADAM": 0.25}
    stages = zero_infinity.MODEL.stage_seconds(values)
    assert stages == {"forward": 4 + 1 + 6 + 4, "backward": 8 + 5 + 14, "optimizer": 14 + 4}
    assert zero_infinity.MODEL.binding(values)["backward"] == "compute or gradients d2h"


def test_the_other_systems_by_hand() -> None:
    flops = {"FLOP_f": 60.0, "FLOP_r": 20.0, "THP_G": 10.0, "P": 1.0, "BW_G": 2.0, "ADAM": 0.25}
    zero = zero_offload.MEASURED.stage_seconds({**flops, "A_inter": 4.0, "BW_PAGE": 1.0})
    assert zero == {"forward": 1 + 6 + 4, "backward": 5 + 14, "optimizer": 4}
    assert gemini.MODEL.stage_seconds({**flops, "BW_OPT": 2.0}) == {
        "forward": 7,
        "backward": 16,
        "optimizer": 12 + 4,
    }
    swapped = {**flops, "A_all": 30.0, "BW_S2M": 4.0, "BW_M2S": 7.0, "BW_GPU_MEM": 28.0}
    assert g10.SEPARATE.stage_seconds(swapped) == {"forward": 15, "backward": 16, "optimizer": 14 / 2}
    assert g10.OVERLAPPED.stage_seconds(swapped) == {"forward": 15, "backward": 44 / 2}
    times = {"T_FWD": 1.0, "T_BWD": 2.0, "T_D2H": 3.0, "T_H2D": 4.0, "T_UPD": 5.0}
    assert zero_offload.LSP_EQ1.seconds(times) == 1 + 3 + 5
    layer = {"T_COMM_layer": 0.25, "T_UPD_layer": 0.5, "T_COMPRESS": 0.125}
    assert lsp_offload.MODEL.seconds({**times, **layer}) == 5.0
    assert lsp_offload.MODEL.seconds({**times, **layer, "T_UPD": 0.0, "T_H2D": 0.0}) == 3.875


@pytest.mark.parametrize(("backward_s", "layer"), [(0.0, 32), (10.0, 31), (1000.0, 0)])
def test_transition_layer_is_rounded_and_stays_within_the_model(backward_s: float, layer: int) -> None:
    assert lsp_offload.transition_layer(32, backward_s, 1.0, 2.0, 3.0) == layer


def test_derivative_is_the_binding_terms_slope() -> None:
    assert lohan.LITERAL.derivative("A_G2M", LOHAN) == 1 / 2 + 1 / 4
    assert lohan.LITERAL.derivative("P", LOHAN) == pytest.approx(14 / 4 + 14 / 5)
    assert lohan.LITERAL.derivative("FLOP_r", LOHAN) == 0.0
    assert lohan.LITERAL.derivative("FLOP_f").free_symbols >= {symbols("THP_G")}


@pytest.mark.parametrize("model", [lohan.LITERAL, fuyou.OVERLAPPED, zero_infinity.MODEL], ids=lambda m: m.name)
def test_derivative_is_what_a_small_step_finds(model: CostModel) -> None:
    values = {name: 2.0 + 0.37 * index for index, name in enumerate(model.names)}
    for name in model.names:
        above, below = ({**values, name: values[name] + step} for step in (1e-5, -1e-5))
        found = (model.seconds(above) - model.seconds(below)) / 2e-5
        assert model.derivative(name, values) == pytest.approx(found, rel=1e-3, abs=1e-6)


def test_numbers_that_are_zero_are_not_printed() -> None:
    printed = lohan.LITERAL.formula({**LOHAN, "MEM_avail": 0.0, "FLOP_r": 0.0})
    assert "compute  2*60/10 = 12 s" in printed
    assert "ssd      30/5 + 2*5/4 = 8.5 s" in printed


def test_equal_numbers_do_not_cancel_in_print() -> None:
    assert LOHAN["P"] == LOHAN["BW_M2S"] == 5.0
    assert "(30 - 10 + 14*5)/4 + 14*5/5 = 36.5 s" in lohan.LITERAL.formula(LOHAN)


def test_mixing_reads_and_writes_costs_time() -> None:
    """60 bytes in and 30 out at 30 and 20 bytes/s take 3.5 s in turns; 30 of each at 22 lose what 2/22 is above."""
    rates = {"ssd_read_bytes_per_s": 30.0, "ssd_write_bytes_per_s": 20.0, "ssd_mixed_bytes_per_s": 22.0}
    seconds = lohan.DRIVES.seconds({"read_bytes": 60.0, "write_bytes": 30.0, **rates})
    assert seconds == pytest.approx(2 * 30 / 22 + 30 / 30)


def test_formula_with_names_and_with_numbers() -> None:
    assert lohan.LITERAL.formula().splitlines()[:5] == [
        "LoHan as printed: T = T_f + T_b",
        "T_f: the max of  [LoHan Eq. 2 with Eq. 3, which is Eq. 4]",
        "    compute  FLOP_f/THP_G",
        "    d2h      A_G2M/BW_G",
        "    h2d      2*P/BW_G",
    ]
    printed = lohan.LITERAL.formula(LOHAN).splitlines()
    assert printed[1].startswith("T_f = 15 s: the max of")
    assert printed[2] == "    compute  60/10 = 6 s"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_prints_itself_and_cites(model: CostModel) -> None:
    text = model.formula(values_of(model))
    assert all(stage.citation and f"[{stage.citation}]" in text for stage in model.stages)
    assert all(term.lane in text for stage in model.stages for term in stage.terms)


def test_the_printed_formula_is_what_the_planner_computes() -> None:
    hw = HardwareProfile.preset("rtx4090-12xP5510")
    work = cost.Work(7.0, 14.0, 3.0, 40, 30, 60, 50, 20, 10, 35, 120, 140, 1000)
    symbols_of = cost.values(work, hw)
    stages = lohan.CORRECTED.stage_seconds(symbols_of)
    assert stages["forward"] == cost.forward_stage(work, hw).seconds
    assert stages["backward"] == cost.backward_stage(work, hw).seconds
    assert sum(stages.values()) == cost.step_seconds(work, hw)
    assert lohan.CORRECTED.binding(symbols_of) == {"forward": "compute", "backward": "compute"}
    naive = replace(work, serial_optimizer=True)
    assert cost.backward_stage(naive, hw).lanes_s["cpu"] > cost.backward_stage(work, hw).lanes_s["cpu"]


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ValueError, match="'LoHan as printed' needs a value for BW_G, P"):
        lohan.LITERAL.evaluate({name: number for name, number in LOHAN.items() if name not in ("P", "BW_G")})
    with pytest.raises(ValueError, match="has no BW_X"):
        lohan.LITERAL.derivative("BW_X")


def test_a_lane_has_one_term_per_stage() -> None:
    x = sympy.Symbol("x")
    with pytest.raises(ValueError, match="two terms of one lane"):
        StageFormula("forward", "T_f", (Term("ssd", x), Term("ssd", 2 * x)), "nowhere", Combine.SUM)


numbers = st.floats(0.25, 1e6)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@given(st.data())
def test_twice_the_rates_halve_the_time(model: CostModel, data: st.DataObject) -> None:
    """Seconds that the model is given count as a rate's inverse; N drives of twice the rate are not 2N of it."""
    values = {name: data.draw(numbers) for name in model.names}
    halved = {name: x / 2 if a_time(name) else x for name, x in values.items()}
    faster = {name: 2 * x if a_rate(name) and name != "N" else x for name, x in halved.items()}
    assert model.seconds(faster) == pytest.approx(model.seconds(values) / 2)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@given(st.data())
def test_a_faster_link_is_never_slower(model: CostModel, data: st.DataObject) -> None:
    values = {name: data.draw(numbers) for name in model.names}
    rates = [name for name in model.names if a_rate(name)]
    if model is lohan.LITERAL:  # more swapped than fits, or Eq. 3 makes a faster drive slower
        values["A_G2M"] += values["MEM_avail"]
    for name in rates:
        faster = {**values, name: 2 * values[name]}
        assert model.seconds(faster) <= model.seconds(values) * (1 + 1e-9)


@given(st.data())
def test_steps_are_convex_in_what_is_swapped(data: st.DataObject) -> None:
    """LoHan's theorems, for a fixed recomputation; the clamp keeps it (c3.1)."""
    values = {name: data.draw(numbers) for name in lohan.OF_A_MODEL.names}
    low, high = sorted(data.draw(st.tuples(numbers, numbers)))
    at = [lohan.OF_A_MODEL.seconds({**values, "A_G2M": a}) for a in (low, (low + high) / 2, high)]
    assert at[1] <= (at[0] + at[2]) / 2 * (1 + 1e-9)


def test_numbers_are_finite() -> None:
    assert all(math.isfinite(model.seconds(values_of(model))) for model in MODELS)


def test_slopes_follow_the_binding_term() -> None:
    p, link, read, write = sympy.symbols("P BW_G BW_S2M BW_M2S", nonnegative=True)
    slopes = lohan.LITERAL.slopes(LOHAN)
    assert slopes["P"] == 14 / read + 14 / write  # the drives bind the backward, the link with A_G2M the forward
    assert sympy.simplify(slopes["A_G2M"] - (1 / link + 1 / read)) == 0
    assert "THP_G" not in slopes
    summed = zero_infinity.MODEL.slopes(values_of(zero_infinity.MODEL))
    assert set(summed) >= {"P", "BW_SSD", "BW_OPT", "ADAM"}  # where lanes wait for each other, all count
    assert p in summed["BW_OPT"].free_symbols
