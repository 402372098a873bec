"""transformer_counts: FLOPs and activation bytes of a transformer, from its dimensions, the way the papers count.

Symbols: b samples, s tokens each, h hidden, L blocks. One unit u is an fp16 tensor (b, s, h): 2bsh bytes; one unit of
work k is bsh^2 FLOPs. Attention is counted as fused: its scores are never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.models.model_families import Family, ModelDims

BLOCK_UNITS = 17
"""u of a block's activations: 34bsh bytes (LoHan fig. 1b: 213 GB in all for 13B at batch 32)."""
BACKWARD_TRANSIENT_UNITS = 8
"""u of gradients that live at once in a block's backward: those of the MLP's hidden tensor, before and after GELU."""


@dataclass(frozen=True)
class LayerCount:
    """A layer of one block: what it works and the bytes of its output."""

    name: str
    flops: float
    bytes: float

    @property
    def benefit(self) -> float:
        """OB of LoHan Eq. 6, FLOPs saved per byte swapped."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class TransformerCounts:
    """``dims`` at ``batch`` samples of ``tokens`` tokens."""

    dims: ModelDims
    batch: int
    tokens: int

    @property
    def unit_bytes(self) -> float:
        """u: an fp16 tensor (b, s, h)."""
        return 2.0 * self.batch * self.tokens * self.dims.hidden

    @property
    def inter_block_bytes(self) -> float:
        """A_interBlock: the blocks' inputs, 2bshL."""
        return self.unit_bytes * self.dims.layers

    @property
    def all_bytes(self) -> float:
        """A_all: 34bshL."""
        return BLOCK_UNITS * self.inter_block_bytes

    @property
    def block_layers(self) -> tuple[LayerCount, ...]:
        """What of one block may be swapped instead of recomputed, the block's input aside; 16u together.

        Fuyou table 2 for the four matmuls; normalisations, GELU and masks cost nothing to speak of.
        """
        u = self.unit_bytes
        k = float(self.batch * self.tokens * self.dims.hidden**2)
        attention = 4.0 * self.batch * self.tokens**2 * self.dims.hidden
        return (
            LayerCount("qkv", 6 * k, 3 * u),
            LayerCount("attention", attention, u),
            LayerCount("htoh", 2 * k, u),
            LayerCount("hto4h", 8 * k, 4 * u),
            LayerCount("4htoh", 8 * k, u),
            LayerCount("rest", 0.0, 6 * u),
        )

    @property
    def block_flops(self) -> float:
        """Forward FLOPs of one block; a DiT's also modulates, per sample and not per token (6h from h)."""
        modulation = 12.0 * self.batch * self.dims.hidden**2 if self.dims.family is Family.DIT else 0.0
        return sum(layer.flops for layer in self.block_layers) + modulation

    @property
    def head_flops(self) -> float:
        """Forward FLOPs of the head: logits over the vocabulary, or the patches of a DiT."""
        outputs = self.dims.patch**2 * self.dims.channels if self.dims.family is Family.DIT else self.dims.vocab
        return 2.0 * self.batch * self.tokens * self.dims.hidden * outputs

    @property
    def forward_flops(self) -> float:
        """FLOP_f. The backward has twice as many (L-TB-01)."""
        return self.dims.layers * self.block_flops + self.head_flops

    @property
    def block_peak_bytes(self) -> float:
        """What a block's backward holds on the device: its activations and the gradients that live at once."""
        return (BLOCK_UNITS + BACKWARD_TRANSIENT_UNITS) * self.unit_bytes
