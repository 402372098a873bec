"""zero_infinity: DeepSpeed ZeRO-Infinity as LoHan (sec. III-B) and Fuyou (sec. 3.2) describe it.

States on the drives, inter-block activations (A_inter) in main memory, everything else recomputed. Almost nothing
overlaps (mechanisms a1; Fuyou fig. 2a): parameters come from the drives, then to the GPU, then it computes, then the
activations leave. Only the gradients' way to main memory hides behind the backward; from there they are written to
the drives. The optimizer is a stage of its own. The drives never reach their own speed: BW_SSD is what they give
during forward and backward, BW_OPT in the optimizer, both for reads and writes; BW_PAGE is the link's rate for what
lies in pageable memory (F-ME-16): activations and gradients.
"""

from __future__ import annotations

import sympy

from lohan_fx.cost_models.formula import Combine, CostModel, StageFormula, Term, symbols


def _model() -> CostModel:
    flop_f, flop_r, thp, p, a = symbols("FLOP_f FLOP_r THP_G P A_inter")
    link, page, ssd, optimizer_ssd, adam = symbols("BW_G BW_PAGE BW_SSD BW_OPT ADAM")
    forward = (
        Term("ssd", 2 * p / ssd),
        Term("h2d", 2 * p / link),
        Term("compute", flop_f / thp),
        Term("d2h", a / page),
    )
    backward = (
        Term("ssd", (2 * p + 2 * p) / ssd),
        Term("h2d", 2 * p / link + a / page),
        Term("compute or gradients d2h", sympy.Max((2 * flop_f + flop_r) / thp, 2 * p / page)),
    )
    optimizer = (
        Term("ssd", (14 * p + 14 * p) / optimizer_ssd),
        Term("cpu", p / adam),
    )
    return CostModel(
        "ZeRO-Infinity",
        (
            StageFormula("forward", "T_f", forward, "Fuyou fig. 2a", Combine.SUM),
            StageFormula("backward", "T_b", backward, "LoHan sec. III-B", Combine.SUM),
            StageFormula("optimizer", "T_o", optimizer, "LoHan fig. 2c: 12P and gradients in, 14P out", Combine.SUM),
        ),
    )


MODEL: CostModel = _model()
