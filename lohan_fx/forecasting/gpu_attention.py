"""gpu_attention: attention with dropout as a GPU runs it, in a graph that is traced on a CPU.

A CPU has no fused attention with dropout: tracing there would show the squares of scores, dropped ones and masks, of which a
GPU keeps none. PyTorch's fused ops for CUDA are put in instead, by the rules by which PyTorch chooses them there. They have
shapes and gradients on any device; nothing is run.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

MOST_FLASH_WIDTH = 256
HALVES = (torch.float16, torch.bfloat16)


def with_gpu_attention(gm: GraphModule) -> None:
    """Let Dynamo's graph ``gm`` call ``attention`` where it calls PyTorch's."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
                node.target = attention
            module.recompile()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention``; with dropout by the op that PyTorch takes on a GPU. Arguments as there."""
    aten: Any = torch.ops.aten
    if dropout_p and _flash_takes(query, key, value, attn_mask, is_causal):
        fused = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return cast(torch.Tensor, fused[0])
    if dropout_p and not enable_gqa and _efficient_takes(query, key, value):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        fused = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
        return cast(torch.Tensor, fused[0])
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _flash_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> bool:
    if mask is not None or query.dim() != 4 or query.dtype not in HALVES:
        return False
    square = query.shape[-2] == key.shape[-2]
    return query.shape[-1] == value.shape[-1] <= MOST_FLASH_WIDTH and (square or not is_causal)


def _efficient_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    if query.dim() != 4 or query.dtype not in (*HALVES, torch.float32):
        return False
    aligned = 8 if query.dtype in HALVES else 4
    return all(x.shape[-1] % aligned == 0 for x in (query, key, value))


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``mask`` as what is added to the scores (B, H, T, S)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
