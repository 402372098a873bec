"""lsp_offload: LSP-Offload's estimate of its layer-wise schedule (Eq. 4), with what it leaves out.

Seconds with ``_layer`` are of one layer: what is left when the last layer's gradient is there. ``T_COMPRESS`` is the
GPU's work on the projectors, which the paper admits and leaves out (mechanisms B8): zero gives its Eq. 4.
"""

from __future__ import annotations

from lohan_fx.cost_models.formula import CostModel, StageFormula, Term, symbols


def _model() -> CostModel:
    forward, backward, update, down, up = symbols("T_FWD T_BWD T_UPD T_D2H T_H2D")
    layer_transfer, layer_update, compress = symbols("T_COMM_layer T_UPD_layer T_COMPRESS")
    terms = (
        Term("compute", forward + backward + compress + layer_transfer + layer_update),
        Term("d2h", down),
        Term("h2d", up),
        Term("cpu", update),
    )
    return CostModel("LSP-Offload", (StageFormula("step", "T_LSP", terms, "LSP-Offload Eq. 4"),))


MODEL: CostModel = _model()


def transition_layer(layers: int, backward_s: float, offload_s: float, update_s: float, upload_s: float) -> int:
    """From which layer on queues are served last come, first served: TransitionLayer, rounded and kept in [0, layers].

    ``backward_s`` is of the whole backward, the others of one layer.
    """
    slack_s = backward_s - (offload_s + update_s + upload_s)
    return min(max(round(layers - slack_s / max(offload_s, update_s, upload_s)), 0), layers)
