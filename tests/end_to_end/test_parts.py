"""Parts of a compiled model called by themselves: as ``generate`` does with an encoder, adapters with what they wrap, and loops
that compute a loss from a backbone and a head."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lohan_fx
from lohan_fx.errors import InfeasiblePlan, StepError
from lohan_fx.hardware import HardwareProfile
from tests.end_to_end.models import LLAMA, T5, VOCABULARY, Case, tokens
from tests.end_to_end.recipes import LR, assert_same_weights, weights_of
from tests.exhaustive import combinations

pytestmark = pytest.mark.usefixtures("leak_check")

POLICIES = ("swap-nvme", "recompute")
STEPS = 4

Loss = Callable[[Any], torch.Tensor]


@contextmanager
def _compiled(model: nn.Module, hw: HardwareProfile, nvme: Path, **options: Any) -> Iterator[Any]:
    nvme.mkdir(exist_ok=True)
    options = {"compute_dtype": torch.float32, "host_memory": "2GiB"} | options
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=nvme, **options)):
        yield model


def _train(model: Any, optimizer: Any, loss_of: Loss, max_norm: float | None = None) -> list[float]:
    """``STEPS`` steps, with plain calls of the whole model's parts in between; each loss."""
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        if max_norm is not None:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- training through parts -----------------------------------------------------------------------------------


def encoder_first(model: Any) -> torch.Tensor:
    batch = T5.batch()
    labels = batch.pop("labels")
    encoded = model.get_encoder()(**batch)
    return model(encoder_outputs=encoded, attention_mask=batch["attention_mask"], labels=labels).loss


def own_embeddings(model: Any) -> torch.Tensor:
    """The embeddings are tied to the head, which is part of another graph: two gradients are summed."""
    batch = tokens()
    embedded = model.get_input_embeddings()(batch["input_ids"])
    return model(inputs_embeds=embedded * 1.5, labels=batch["labels"]).loss


def backbone_and_head(model: Any) -> torch.Tensor:
    """The whole model is never called."""
    ids = tokens()["input_ids"]
    hidden = model.model(ids).last_hidden_state
    logits = model.lm_head(hidden[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def whole_and_part(model: Any) -> torch.Tensor:
    """Some steps have a term of the backbone's own. It begins behind the embeddings: they would have three gradients then, which
    eager adds in another order."""
    batch = tokens()
    loss = model(**batch).loss
    if batch["input_ids"][0, 0] % 2:
        loss = loss + model.model(inputs_embeds=torch.randn(2, 16, 64)).last_hidden_state.square().mean()
    return loss


LOSSES: tuple[tuple[Case, Loss], ...] = (
    (T5, encoder_first), (LLAMA, own_embeddings), (LLAMA, backbone_and_head), (LLAMA, whole_and_part),
)  # fmt: skip


@pytest.mark.parametrize(
    ("of", "policy"),
    [pytest.param(of, policy, id=f"{of[1].__name__}-{policy}") for of, policy in combinations(LOSSES, POLICIES)],
)
def test_training_through_parts_is_exact(
    of: tuple[Case, Loss], policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    case, loss_of = of
    plain = case.build()
    wanted = _train(plain, torch.optim.AdamW(plain.parameters(), lr=LR), loss_of)
    with _compiled(case.build(), hw, tmp_path, policy=policy) as model:
        assert _train(model, lohan_fx.AdamW(model.parameters(), lr=LR), loss_of) == wanted
    assert_same_weights(weights_of(model), weights_of(plain))


def test_clipping_through_parts_is_exact(hw: HardwareProfile, tmp_path: Path) -> None:
    plain = LLAMA.build()
    wanted = _train(plain, torch.optim.AdamW(plain.parameters(), lr=LR), own_embeddings, max_norm=0.1)
    with _compiled(LLAMA.build(), hw, tmp_path, policy="swap-nvme") as model:
        assert _train(model, lohan_fx.AdamW(model.parameters(), lr=LR), own_embeddings, max_norm=0.1) == wanted
    assert_same_weights(weights_of(model), weights_of(plain))


def test_updates_run_in_the_backward_of_the_last_part(hw: HardwareProfile, tmp_path: Path) -> None:
    """Once it is learned that a loss takes two graphs: the second of them is what ``accumulation_steps`` counts."""
    with _compiled(LLAMA.build(), hw, tmp_path, policy="swap-nvme") as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for _ in range(2):
            backbone_and_head(model).backward()
            optimizer.step()
        backbone_and_head(model).backward()
        with pytest.raises(StepError, match="the update already ran inside the backward"):
            optimizer.zero_grad()
        optimizer.step()


# --- hooks, and what is traced through a part -----------------------------------------------------------------


def test_hooks_of_a_part_run_within_the_model_and_by_itself(hw: HardwareProfile, tmp_path: Path) -> None:
    def doubled(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def loss_of(model: Any) -> torch.Tensor:
        batch = tokens()
        alone = model.model.layers[0].mlp(model.get_input_embeddings()(batch["input_ids"]))
        return model(**batch).loss + alone.square().mean()

    models = LLAMA.build(), LLAMA.build()
    for one in models:
        one.model.layers[0].mlp.register_forward_hook(doubled)
    plain, model = models
    wanted = _train(plain, torch.optim.AdamW(plain.parameters(), lr=LR), loss_of)
    with _compiled(model, hw, tmp_path):
        assert _train(model, lohan_fx.AdamW(model.parameters(), lr=LR), loss_of) == wanted
    assert_same_weights(weights_of(model), weights_of(plain))


def test_a_part_within_a_function_that_somebody_else_compiles(hw: HardwareProfile, tmp_path: Path) -> None:
    """It runs in its own graph, as the whole model does there."""
    plain = LLAMA.build().eval()
    ids = tokens()["input_ids"]

    def function(model: Any) -> torch.Tensor:
        return model.model(ids).last_hidden_state.tanh() + 1

    with _compiled(LLAMA.build().eval(), hw, tmp_path) as model, torch.no_grad():
        assert torch.equal(torch.compile(function, backend="eager")(model), function(plain))


def test_released_parts_are_ordinary_again(hw: HardwareProfile, tmp_path: Path) -> None:
    plain, model = LLAMA.build().eval(), LLAMA.build().eval()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    ids = tokens()["input_ids"]
    with _compiled(model, hw, tmp_path), torch.no_grad():
        model.model(ids)
    assert all(
        vars(module).keys() - {"_compiled_call_impl"} <= before[name].keys() for name, module in model.named_modules()
    )
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert torch.equal(model.model(ids).last_hidden_state, plain.model(ids).last_hidden_state)
    copy.deepcopy(model)


# --- generation and evaluation --------------------------------------------------------------------------------


def _seq2seq() -> Any:
    """With weights so large that it says more than one word."""
    model = T5.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_sequence_to_sequence_model_generates(use_cache: bool, hw: HardwareProfile, tmp_path: Path) -> None:
    batch = T5.batch()
    del batch["labels"]
    how = {"max_new_tokens": 6, "use_cache": use_cache}
    wanted = _seq2seq().generate(**batch, **how)
    assert len(wanted.unique()) > 2
    with _compiled(_seq2seq(), hw, tmp_path) as model:
        assert torch.equal(model.generate(**batch, **how), wanted)


def test_methods_that_call_parts(hw: HardwareProfile, tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 2, "max_position_embeddings": 32, "eos_token_id": 1}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 16, "patch_size": 4}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        return transformers.CLIPModel(config).eval()

    torch.manual_seed(2)
    ids, pixels = tokens()["input_ids"], torch.randn(2, 3, 16, 16)

    def features(model: Any) -> list[torch.Tensor]:
        found = model.get_text_features(input_ids=ids), model.get_image_features(pixel_values=pixels)
        return [getattr(one, "pooler_output", one) for one in found]

    with _compiled(build(), hw, tmp_path) as model, torch.no_grad():
        for found, wanted in zip(features(model), features(build()), strict=True):
            assert torch.equal(found, wanted)


def test_a_part_that_does_not_fit_is_refused_and_the_model_goes_on(hw: HardwareProfile, tmp_path: Path) -> None:
    ids = tokens()["input_ids"]
    with _compiled(LLAMA.build().eval(), hw, tmp_path, host_memory="400MiB") as model, torch.no_grad():
        with pytest.raises(InfeasiblePlan, match="a call of this model without gradients"):
            model.lm_head(torch.ones(1 << 20, 64))
        assert torch.equal(model(ids).logits, LLAMA.build().eval()(ids).logits)


# --- adapters -------------------------------------------------------------------------------------------------


def _with_adapters() -> Any:
    """LoRA by PEFT: the base is frozen, and ``generate`` calls the base, not the model that was compiled."""
    base = LLAMA.build()
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # else zeros: adapters that change nothing
    return model


def test_adapters_train_generate_and_are_saved(hw: HardwareProfile, tmp_path: Path) -> None:
    def run(model: Any, adamw: Any) -> tuple[list[float], torch.Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        losses = _train(model, adamw(trained, lr=LR), lambda model: model(**tokens()).loss, max_norm=0.1)
        ids = tokens()["input_ids"]
        generated = model.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        return losses, generated

    plain = _with_adapters()
    losses, generated = run(torch.compile(plain, backend="aot_eager"), torch.optim.AdamW)
    with _compiled(_with_adapters(), hw, tmp_path / "nvme", policy="swap-nvme") as model:
        found = run(model, lohan_fx.AdamW)
        assert found[0] == losses
        assert torch.equal(found[1], generated)
        model.save_pretrained(tmp_path / "adapters")
    assert_same_weights(weights_of(model), weights_of(plain))
    again = peft.PeftModel.from_pretrained(LLAMA.build(), tmp_path / "adapters")
    shutil.rmtree(tmp_path / "adapters")
    saved = peft.get_peft_model_state_dict(again)
    for name, value in peft.get_peft_model_state_dict(plain).items():
        assert torch.equal(saved[name], value), name
