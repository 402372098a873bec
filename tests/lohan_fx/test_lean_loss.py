"""lean_loss: the same loss and gradients in less memory."""

from __future__ import annotations

import copy
import inspect
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lohan_fx
from lohan_fx import lean_loss
from lohan_fx.forecasting.meta_capture import meta_capture
from lohan_fx.lean_loss import lean_causal_loss, with_lean_loss
from lohan_fx.passes.liveness import peaks
from tests.end_to_end.models import VOCABULARY, gpt2, llama, tokens
from tests.lohan_fx.forecasting.test_meta_capture import GPU, MIB, Asked, make_request, plan_training


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_loss, "PIECE_BYTES", 4 * VOCABULARY * 8)


@pytest.mark.parametrize("make", [lambda: gpt2(dropout=0.0), llama])
def test_loss_and_gradients_are_those_of_the_model(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    lean = with_lean_loss(copy.deepcopy(model))
    batch = tokens()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :5] = -100
    losses = [m(**batch).loss for m in (model, lean)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(lean.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_logits_come_back_only_where_there_is_no_loss() -> None:
    lean: Any = with_lean_loss(llama())
    batch = tokens()
    assert lean(**batch).logits is None and "logits" not in lean(**batch)
    assert lean(input_ids=batch["input_ids"]).logits.shape == (*batch["input_ids"].shape, VOCABULARY)


def test_a_tuple_has_no_logits_either() -> None:
    lean: Any = with_lean_loss(llama())
    batch = tokens()
    expected, *others = lean(**batch, use_cache=True).to_tuple()
    loss, *rest = lean(**batch, use_cache=True, return_dict=False)
    assert torch.equal(loss, expected) and len(rest) == len(others) == 1
    assert lean(batch["input_ids"], return_dict=False, use_cache=False)[0].shape == (
        *batch["input_ids"].shape,
        VOCABULARY,
    )


def test_a_count_that_is_given_divides() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 16, VOCABULARY), torch.randint(0, VOCABULARY, (2, 16))
    mean = lean_causal_loss(logits, labels, VOCABULARY)
    torch.testing.assert_close(lean_causal_loss(logits, labels, VOCABULARY, num_items_in_batch=15), mean * 30 / 15)


def test_a_model_of_another_kind() -> None:
    with pytest.raises(TypeError, match="Linear has no loss_function to replace"):
        with_lean_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("patched", [False, True])
def test_forward_keeps_its_argument_names(patched: bool) -> None:
    model: Any = llama()
    if patched:
        model.forward = model.forward
    names = inspect.signature(model.forward).parameters.keys()
    lean: Any = with_lean_loss(model)
    assert inspect.signature(lean.forward).parameters.keys() == names >= {"input_ids", "labels"}
    batch = tokens()
    assert "logits" not in lean(**batch)
    assert lean.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape[1] == 18


@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_has_its_own_parameters(patched: bool) -> None:
    model: Any = llama()
    if patched:
        model.forward = types.MethodType(type(model).forward, model)
    lean: Any = with_lean_loss(model)
    twin = copy.deepcopy(lean)
    batch = tokens()
    expected = lean(**batch).loss
    for parameter in lean.parameters():
        parameter.data.zero_()
    assert torch.equal(twin(**batch).loss, expected)


def test_a_second_time_changes_nothing() -> None:
    lean: Any = with_lean_loss(llama())
    forward = vars(lean)["forward"]
    assert with_lean_loss(lean) is lean and vars(lean)["forward"] is forward


def test_a_loss_of_another_kind() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model: Any = transformers.BertForMaskedLM(config)
    with pytest.raises(TypeError, match="the loss of BertForMaskedLM is ForMaskedLMLoss, and only ForCausalLMLoss"):
        with_lean_loss(model)
    assert "forward" not in vars(model) and model.loss_function.__name__ == "ForMaskedLMLoss"


def test_recomputed_pieces_leave_the_peak_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rows of 8 x 64 tokens times 8192 words in float32 take 16 MiB, and a piece 1 MiB.
    monkeypatch.setattr(lean_loss, "PIECE_BYTES", MIB)
    found = []
    for change in (lambda model: model, with_lean_loss):
        model = llama()
        model.resize_token_embeddings(8192)
        inputs = {name: torch.zeros(8, 64, dtype=torch.long) for name in ("input_ids", "labels")}
        capture = meta_capture(change(model), inputs, compute_dtype=torch.bfloat16)
        request = make_request(capture, Asked(GPU, policy="recompute"))
        halves, plan = plan_training(
            capture.joint, request, num_outputs=capture.num_outputs, parameters=capture.parameters
        )
        found.append(max(peak.bytes for peak in peaks(halves, plan).values()))
    assert found[1] < 0.6 * found[0]


def test_it_trains_streamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = with_lean_loss(llama())
    batch = tokens()
    expected = model(**batch).loss.item()
    lohan_fx.compile(
        model, replace(GPU, device="cpu"), nvme=[tmp_path], compute_dtype=torch.float32, host_memory="2GiB"
    )
    optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-3)
    try:
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        lohan_fx.release(model)
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
