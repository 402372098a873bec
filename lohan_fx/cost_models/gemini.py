"""gemini: Colossal-AI with Gemini, as LoHan (sec. III-B, V-A) and Fuyou (sec. 5.1) describe it.

Parameters and gradients in main memory, optimizer states on the drives, inter-block activations in the GPU, the rest
recomputed; Adam on the CPU after the backward. Nothing overlaps (the GPU is busy 12 % of a step, L-ME-02). ``BW_OPT``
is what the drives give in the optimizer, reads and writes of 12P each.
"""

from __future__ import annotations

from lohan_fx.cost_models.formula import Combine, CostModel, StageFormula, Term, symbols


def _model() -> CostModel:
    flop_f, flop_r, thp, p, link, optimizer_ssd, adam = symbols("FLOP_f FLOP_r THP_G P BW_G BW_OPT ADAM")
    forward = (Term("h2d", 2 * p / link), Term("compute", flop_f / thp))
    backward = (
        Term("h2d", 2 * p / link),
        Term("compute", (2 * flop_f + flop_r) / thp),
        Term("d2h", 2 * p / link),
    )
    optimizer = (Term("ssd", (12 * p + 12 * p) / optimizer_ssd), Term("cpu", p / adam))
    return CostModel(
        "Colossal-AI Gemini",
        (
            StageFormula("forward", "T_f", forward, "LoHan sec. III-B", Combine.SUM),
            StageFormula("backward", "T_b", backward, "LoHan sec. III-B", Combine.SUM),
            StageFormula("optimizer", "T_o", optimizer, "Fuyou sec. 5.1", Combine.SUM),
        ),
    )


MODEL: CostModel = _model()
