"""transformer_counts: the papers' bytes and FLOPs of 13B at batch 32, and a DiT's."""

from __future__ import annotations

import pytest

from lohan_fx.models.model_presets import named
from lohan_fx.models.transformer_counts import TransformerCounts

THIRTEEN = TransformerCounts(named("gpt3-13b"), batch=32, tokens=1024)


def test_activations_are_those_of_lohan() -> None:
    """12.5, 200 and 213 GB are binary ones (L-ME-04, L-ME-05)."""
    assert THIRTEEN.inter_block_bytes / 2**30 == 12.5
    assert THIRTEEN.all_bytes / 2**30 == 212.5


def test_a_block_is_its_input_and_its_layers() -> None:
    assert sum(layer.bytes for layer in THIRTEEN.block_layers) == 16 * THIRTEEN.unit_bytes


def test_benefits_are_those_of_fuyou() -> None:
    """Swap benefit of qkv, htoh, hto4h and 4htoh is 1:1:1:4 (F-EQ-07)."""
    benefit = {layer.name: layer.benefit for layer in THIRTEEN.block_layers}
    assert [benefit[name] / benefit["qkv"] for name in ("qkv", "htoh", "hto4h", "4htoh")] == [1, 1, 1, 4]


def test_forward_flops_by_hand() -> None:
    b, s, h, blocks, vocabulary = 32, 1024, 5120, 40, 50257
    expected = blocks * (24 * b * s * h**2 + 4 * b * s**2 * h) + 2 * b * s * h * vocabulary
    assert pytest.approx(expected) == THIRTEEN.forward_flops
    assert expected == pytest.approx(2 * 12.85e9 * b * s + 4 * b * s**2 * h * blocks, rel=2e-3)


def test_a_dit_modulates_once_per_sample() -> None:
    dims = named("dit-xl-2")
    counts = TransformerCounts(dims, batch=2, tokens=dims.tokens)
    matmuls = 24 * 2 * dims.tokens * dims.hidden**2 + 4 * 2 * dims.tokens**2 * dims.hidden
    assert counts.block_flops == matmuls + 2 * 2 * 6 * dims.hidden**2
    assert counts.head_flops == 2 * 2 * dims.tokens * dims.hidden * 16
