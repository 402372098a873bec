"""fuyou: Fuyou's cost model (Eq. 1 to 8), without overlap as in its ablation, and its swap scheduling (Eq. 9 to 12).

Corrected as mechanisms c3.21 says: the FLOPs of a layer are divided by the throughput, not multiplied; Eq. 10 bounds
what is swapped beyond D_start. ``RC`` is the seconds of recomputation, RC(D_f) of Eq. 8; rates are of one drive, N of
which work together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan_fx.cost_models.formula import CostModel, StageFormula, Term, symbols


def _forward() -> StageFormula:
    t_f, p, d_f, link, read, write, drives = symbols("T_f_comp p D_f BW_GPU BW_S2C BW_C2S N")
    terms = (
        Term("compute", t_f),
        Term("h2d", 2 * p / link),
        Term("d2h", d_f / link),
        Term("ssd", 2 * p / (read * drives) + d_f / (write * drives)),
    )
    return StageFormula("forward", "T_f", terms, "Fuyou Eq. 2-4")


def _overlapped() -> CostModel:
    t_f, rc, t_o, p, d_f, link = symbols("T_f_comp RC T_o_comp p D_f BW_GPU")
    read, write, drives = symbols("BW_S2C BW_C2S N")
    terms = (
        Term("compute", 2 * t_f + rc),
        Term("cpu", t_o),
        Term("d2h", 2 * p / link),
        Term("h2d", (2 * p + d_f) / link),
        Term("ssd", (14 * p + d_f) / (read * drives) + 14 * p / (write * drives)),
    )
    backward = StageFormula("backward", "T_{b+o}", terms, "Fuyou Eq. 5-8")
    return CostModel("Fuyou", (_forward(), backward))


def _not_overlapped() -> CostModel:
    """The optimizer in a stage of its own, within which the CPU and the drives overlap."""
    t_f, rc, t_o, p, d_f, link = symbols("T_f_comp RC T_o_comp p D_f BW_GPU")
    read, write, drives = symbols("BW_S2C BW_C2S N")
    backward = (
        Term("compute", 2 * t_f + rc),
        Term("d2h", 2 * p / link),
        Term("h2d", (2 * p + d_f) / link),
        Term("ssd", (2 * p + d_f) / (read * drives) + 2 * p / (write * drives)),
    )
    optimizer = (
        Term("cpu", t_o),
        Term("ssd", 14 * p / (read * drives) + 14 * p / (write * drives)),
    )
    return CostModel(
        "Fuyou without overlapping",
        (
            _forward(),
            StageFormula("backward", "T_b", backward, "Fuyou sec. 4.3: gradients go to the drives"),
            StageFormula("optimizer", "T_o", optimizer, "Fuyou sec. 4.3: and come back with the states"),
        ),
    )


OVERLAPPED: CostModel = _overlapped()
NOT_OVERLAPPED: CostModel = _not_overlapped()


@dataclass(frozen=True)
class SwapLayer:
    """A layer whose output may be swapped instead of recomputed: bytes of it and seconds that this saves."""

    bytes: float
    recompute_s: float

    @property
    def benefit(self) -> float:
        """SBF of Eq. 12 up to a constant: seconds saved per byte swapped."""
        return self.recompute_s / self.bytes


def slack_seconds(values: Mapping[str, float]) -> float:
    """T_max of Eq. 9 at these values: how much longer the GPU works in the backward than links and drives do."""
    lanes = OVERLAPPED.evaluate(values)["backward"]
    return lanes["compute"] - max(lanes["d2h"], lanes["h2d"], lanes["ssd"])


def most_swapped_bytes(values: Mapping[str, float]) -> float:
    """D_max of Eq. 10 and 11: the bytes beyond D_start (the ``D_f`` of ``values``) that fit in the slack, added to it."""
    drives = values["N"]
    slowest = min(values["BW_GPU"], drives * values["BW_C2S"], drives * values["BW_S2C"])
    return values["D_f"] + max(0.0, slack_seconds(values)) * slowest


def schedule_swaps(values: Mapping[str, float], layers: Sequence[SwapLayer]) -> tuple[float, float]:
    """(D_f, seconds of a step) that Fuyou arrives at (sec. 4.5, mechanisms B6).

    ``values``: at D_start, with the recomputation ``RC`` that it leaves. Layers are added in descending benefit while D_f
    stays within D_max, and the fastest count is taken; where the GPU does not bind at D_start, nothing is added.
    """
    best = (values["D_f"], OVERLAPPED.seconds(values))
    if OVERLAPPED.binding(values)["backward"] != "compute":
        return best
    most = most_swapped_bytes(values)
    tried = dict(values)
    for layer in sorted(layers, key=lambda layer: -layer.benefit):
        tried["D_f"] += layer.bytes
        tried["RC"] -= layer.recompute_s
        if tried["D_f"] > most:
            break
        best = min(best, (tried["D_f"], OVERLAPPED.seconds(tried)), key=lambda pair: pair[1])
    return best
