"""g10: G10 as LoHan simulates it (sec. III-C): GPUDirect, everything swapped, nothing recomputed, Adam on the GPU.

Pipelining is perfect. Activations cross the GPU's link only (main memory and drives are one pool to them). In a
separate optimizer stage, 14P come from the drives and 14P go back; ``OVERLAPPED`` moves them during the backward, and
then the GPU's link is what binds (c3.17: the paper's 69 % is not that of simplex drives).
"""

from __future__ import annotations

from lohan_fx.cost_models.formula import CostModel, StageFormula, Term, symbols


def _forward() -> StageFormula:
    flop_f, thp, p, a, link = symbols("FLOP_f THP_G P A_all BW_G")
    terms = (Term("compute", flop_f / thp), Term("h2d", 2 * p / link), Term("d2h", a / link))
    return StageFormula("forward", "T_f", terms, "LoHan sec. III-C, fig. 1b")


def _separate() -> CostModel:
    flop_f, thp, p, a, link = symbols("FLOP_f THP_G P A_all BW_G")
    read, write, memory = symbols("BW_S2M BW_M2S BW_GPU_MEM")
    backward = (Term("compute", 2 * flop_f / thp), Term("h2d", (2 * p + a) / link), Term("d2h", 2 * p / link))
    optimizer = (
        # Adam reads P32, OS32 and G16 and writes P32, OS32 and P16.
        Term("compute", 28 * p / memory),
        Term("link", 14 * p / link),
        Term("ssd", 14 * p / read + 14 * p / write),
    )
    return CostModel(
        "G10",
        (
            _forward(),
            StageFormula("backward", "T_b", backward, "LoHan sec. III-C"),
            StageFormula("optimizer", "T_o", optimizer, "LoHan sec. III-C"),
        ),
    )


def _overlapped() -> CostModel:
    flop_f, thp, p, a, link, memory = symbols("FLOP_f THP_G P A_all BW_G BW_GPU_MEM")
    backward = (
        Term("compute", 2 * flop_f / thp + 28 * p / memory),
        Term("h2d", (14 * p + a) / link),
        Term("d2h", 14 * p / link),
    )
    return CostModel(
        "G10 with its optimizer overlapped",
        (_forward(), StageFormula("backward", "T_{b+o}", backward, "LoHan sec. III-C")),
    )


SEPARATE: CostModel = _separate()
OVERLAPPED: CostModel = _overlapped()
