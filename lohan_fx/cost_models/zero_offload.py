"""zero_offload: ZeRO-Offload, as LoHan and Fuyou measured it, and as LSP-Offload models it (Eq. 1).

``MEASURED``: all states in main memory, parameters streamed, inter-block activations to main memory, the rest
recomputed, gradients leave during the backward, then Adam on the CPU with the delayed update off (mechanisms a1).
``LSP_EQ1``: parameters on the GPU; gradients down during the backward, then updates up while they are computed.
"""

from __future__ import annotations

import sympy

from lohan_fx.cost_models.formula import Combine, CostModel, StageFormula, Term, symbols


def _measured() -> CostModel:
    flop_f, flop_r, thp, p, a, link, page, adam = symbols("FLOP_f FLOP_r THP_G P A_inter BW_G BW_PAGE ADAM")
    forward = (
        Term("h2d", 2 * p / link),
        Term("compute", flop_f / thp),
        Term("d2h", a / page),
    )
    backward = (
        Term("h2d", 2 * p / link + a / page),
        Term("compute or gradients d2h", sympy.Max((2 * flop_f + flop_r) / thp, 2 * p / link)),
    )
    return CostModel(
        "ZeRO-Offload",
        (
            StageFormula("forward", "T_f", forward, "LoHan sec. V-A", Combine.SUM),
            StageFormula("backward", "T_b", backward, "LoHan sec. V-A", Combine.SUM),
            StageFormula("optimizer", "T_o", (Term("cpu", p / adam),), "LoHan sec. V-A"),
        ),
    )


def _lsp_eq1() -> CostModel:
    forward, backward, update, down, up = symbols("T_FWD T_BWD T_UPD T_D2H T_H2D")
    return CostModel(
        "ZeRO-Offload by LSP-Offload",
        (
            StageFormula("forward", "T_FWD", (Term("compute", forward),), "LSP-Offload Eq. 1"),
            StageFormula("backward", "T_b", (Term("compute", backward), Term("d2h", down)), "LSP-Offload Eq. 1"),
            StageFormula("optimizer", "T_o", (Term("cpu", update), Term("h2d", up)), "LSP-Offload Eq. 1"),
        ),
    )


MEASURED: CostModel = _measured()
LSP_EQ1: CostModel = _lsp_eq1()
