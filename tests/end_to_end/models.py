"""Small models of the families that must train exactly: built from configs, on one seed, without any download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from lohan_fx.models.dit import DiT

VOCABULARY = 96
BATCH = 2
TOKENS = 16

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its data. ``batch`` draws from torch's global generator, as dropout does."""

    name: str
    make: Callable[[], Any]
    batch: Callable[[], Batch]

    def build(self) -> Any:
        """The model in training mode, always with the same weights."""
        torch.manual_seed(0)
        return self.make().train()

    def __str__(self) -> str:
        return self.name


@dataclass
class Output:
    """What the models written here return."""

    loss: torch.Tensor
    prediction: torch.Tensor


class Perceptron(nn.Module):
    """Traced in a moment: for what does not depend on the model. ``forward(x (B, 24), y (B, 8))``."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.up = nn.Linear(24, 64)
        self.norm = nn.LayerNorm(64)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        prediction = self.down(self.dropout(F.gelu(self.norm(self.up(x.to(self.up.weight.dtype))))))
        return Output(F.mse_loss(prediction, y.to(prediction.dtype)), prediction)


def vectors(batch: int = 6) -> Batch:
    return {"x": torch.randn(batch, 24), "y": torch.randn(batch, 8)}


def tokens(batch: int = BATCH, length: int = TOKENS) -> Batch:
    ids = torch.randint(0, VOCABULARY, (batch, length))
    return {"input_ids": ids, "labels": ids}


def gpt2(*, layers: int = 2, dropout: float = 0.1) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=64, use_cache=False,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def llama(*, layers: int = 2) -> nn.Module:
    """Grouped-query attention (two key-value heads for four query heads), embeddings tied to the head.

    Heads of 16: of 8, PyTorch's own tracing (``aot_eager``) rounds the backward of grouped queries unlike eager.
    """
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=80, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, word_embed_proj_dim=32, use_cache=False, dropout=0.1,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """An encoder and a decoder that share their embedding, and positions as a bias of the first block's attention."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.1,
            decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
            num_labels=10,
            problem_type="single_label_classification",
        )
    )  # fmt: skip  else the first call sets its type, and the second is traced anew for that


def dit() -> nn.Module:
    """The model of the DiT presets. Its zeros are small normals here: gradients reach everything from the first step."""
    model = DiT(width=32, heads=2, depth=2, latent=8, classes=10)
    for name, parameter in model.named_parameters():
        if "modulation.weight" in name or name == "head.weight":
            nn.init.normal_(parameter, std=0.02)
    return model


def pairs_of_texts() -> Batch:
    """Of two lengths: what follows the end is masked in the first texts, and no label in the second."""
    found = {
        "input_ids": torch.randint(0, VOCABULARY, (BATCH, TOKENS)),
        "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long),
        "labels": torch.randint(0, VOCABULARY, (BATCH, TOKENS // 2)),
    }
    found["attention_mask"][0, -4:] = 0
    found["labels"][1, -3:] = -100
    return found


def images() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 10, (BATCH,))}


def diffusion() -> Batch:
    return {
        "latents": torch.randn(BATCH, 4, 8, 8),
        "timesteps": torch.randint(0, 1000, (BATCH,)),
        "labels": torch.randint(0, 11, (BATCH,)),
        "noise": torch.randn(BATCH, 4, 8, 8),
    }


GPT2 = Case("gpt2", gpt2, tokens)
GPT2_SHALLOW = Case("gpt2-shallow", lambda: gpt2(layers=1), tokens)
LLAMA = Case("llama", llama, tokens)
LLAMA_SHALLOW = Case("llama-shallow", lambda: llama(layers=1), tokens)
OPT = Case("opt", opt, tokens)
T5 = Case("t5", t5, pairs_of_texts)
VIT = Case("vit", vit, images)
DIT = Case("dit", dit, diffusion)
PERCEPTRON = Case("perceptron", Perceptron, vectors)
CASES = (GPT2, LLAMA, OPT, VIT, DIT)
