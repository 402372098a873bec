"""gpu_attention: a plan for a GPU sees attention with dropout as PyTorch runs it there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from lohan_fx import meta, ops
from lohan_fx.forecasting.gpu_attention import attention
from lohan_fx.forecasting.meta_capture import MetaCapture, meta_capture
from lohan_fx.plan import Keep, Swap, Tier
from tests.end_to_end.models import gpt2, tokens
from tests.lohan_fx.forecasting.test_meta_capture import GPU, Asked, make_request, plan_training

FLASH, EFFICIENT = "flash", "efficient"


def captured(device: str, *, dropout: float = 0.1) -> MetaCapture:
    return meta_capture(gpt2(dropout=dropout), tokens(), compute_dtype=torch.bfloat16, device=device)


def squares(found: MetaCapture) -> list[str]:
    """Values with a score for each pair of positions of each head."""
    batch, length = tokens()["input_ids"].shape
    shapes = {n.name: getattr(meta.value(n), "shape", ()) for n in found.joint.graph.nodes}
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 4 and shape[0] == batch and shape[2:] == (length, length)
    ]


def test_no_squares_of_scores_are_planned_for_a_gpu() -> None:
    cpu, gpu, without = captured("cpu"), captured("cuda"), captured("cuda", dropout=0.0)
    computed = [n for n in gpu.joint.graph.nodes if n.name in squares(gpu) and n.op == "call_function"]
    assert len(squares(cpu)) > 10 and not any(meta.cost(n).flops for n in computed)
    fused = [n for n in gpu.joint.graph.nodes if "_scaled_dot_product_" in str(n.target)]
    assert [meta.cost(n).is_random for n in fused] == [True] * len(fused) and len(fused) == 4  # both ways of two layers
    assert not [n for n in without.joint.graph.nodes if "efficient" in str(n.target)]
    bmm = torch.ops.aten.bmm.default
    assert cpu.joint.graph.find_nodes(op="call_function", target=bmm)
    assert not gpu.joint.graph.find_nodes(op="call_function", target=bmm)


def test_it_is_planned_with_all_that_it_returns() -> None:
    found = captured("cuda")
    request = make_request(found, Asked(GPU, policy="recompute"))
    halves, plan = plan_training(found.joint, request, num_outputs=found.num_outputs, parameters=found.parameters)
    ran = [n.name for n in halves.forward.graph.nodes if "_scaled_dot_product_" in str(n.target)]
    assert halves.backward is not None and plan.prediction is not None
    again = [
        n
        for n in halves.backward.graph.nodes
        if "_scaled_dot_product_" in str(n.target) and "backward" not in str(n.target)
    ]
    assert len(ran) == 2 and again == []  # what draws is not run again


def test_its_seeds_are_not_planned_to_leave_for_a_drive() -> None:
    """They lie in host memory: where all is swapped, they stay, and a drive is not foretold to move them."""
    found = meta_capture(gpt2(dropout=0.1), tokens(), compute_dtype=torch.float32, device="cuda")
    request = make_request(found, Asked(GPU, policy="swap-nvme", compute_dtype=torch.float32))
    halves, plan = plan_training(found.joint, request, num_outputs=found.num_outputs, parameters=found.parameters)
    attention = [a for a in plan.activations if "_scaled_dot_product_efficient" in a.op]
    assert {a.decision for a in attention if a.bytes > 8} == {Swap(Tier.NVME)}
    assert [a.decision for a in attention if a.bytes == 8] == [Keep()] * 4  # two of two layers
    swapped = [meta.origin(n) for n in halves.forward.graph.find_nodes(op="call_function", target=ops.SWAP_OUT)]
    assert not {a.node for a in attention if a.bytes == 8} & set(swapped)


def inputs(**changes: Any) -> dict[str, Any]:
    heads, width = changes.pop("heads", 4), changes.pop("width", 16)
    dtype = changes.pop("dtype", torch.bfloat16)
    q = torch.randn(2, 4, 10, width, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, heads, 10, width, dtype=dtype, requires_grad=True) for _ in range(2))
    return {"query": q, "key": k, "value": v, "dropout_p": 0.1, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, FLASH),
        ({"is_causal": True}, FLASH),
        ({"heads": 2, "enable_gqa": True}, FLASH),
        ({"dtype": torch.float32}, EFFICIENT),
        ({"width": 264}, EFFICIENT),
        ({"attn_mask": torch.bool}, EFFICIENT),
        ({"attn_mask": torch.bfloat16}, EFFICIENT),
        ({"width": 12, "attn_mask": torch.bool}, None),
        ({"heads": 2, "enable_gqa": True, "attn_mask": torch.bool}, None),
        ({"dtype": torch.float64}, None),
        ({"dropout_p": 0.0}, None),
    ],
    ids=str,
)
def test_the_op_is_the_one_that_a_gpu_takes(changes: dict[str, Any], expected: str | None) -> None:
    """By the rules of PyTorch's ``sdp_utils.cpp``; with shapes, strides of the outputs and gradients."""
    with FakeTensorMode():
        given = inputs(**changes)
        if "attn_mask" in given:
            given["attn_mask"] = torch.ones(2, 1, 10, 10).to(given["attn_mask"])
        out = attention(**given)
        name = type(out.grad_fn).__name__
        assert ("FlashAttentionBackward" in name, "EfficientAttention" in name) == (
            expected == FLASH,
            expected == EFFICIENT,
        )
        out.float().sum().backward()
        assert out.shape == given["query"].shape and out.dtype == given["query"].dtype
        for name in ("query", "key", "value"):
            assert given[name].grad.shape == given[name].shape


def test_without_dropout_it_is_pytorchs() -> None:
    given = inputs(dropout_p=0.0, is_causal=True)
    assert torch.equal(attention(**given), scaled_dot_product_attention(**given))
