"""model_families: model architectures by their dimensions: how many parameters, and the real model on ``meta``.

Nothing here allocates: models are built on ``torch.device("meta")``, and counts come from the dimensions alone.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan_fx.models.dit import DiT


class Family(enum.StrEnum):
    """An architecture, by the name that its Hugging Face config has."""

    GPT2 = "gpt2"
    OPT = "opt"
    GPT_NEOX = "gpt_neox"
    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    PHI3 = "phi3"
    ROBERTA = "roberta"
    DIT = "dit"


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of one model.

    ``kv_heads``, ``head_dim``, ``ffn``: 0 where they follow from the others (``heads``, ``hidden // heads``,
    ``4 * hidden``). ``positions``: the longest sequence. A DiT has, instead of ``vocab``, an ``image`` of so many
    pixels a side (its latent has an eighth), cut in ``patch`` x ``patch``, and ``classes`` that it is conditioned on.
    ``source``: where the numbers come from.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    source: str
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    positions: int = 0
    tied: bool = False
    image: int = 0
    patch: int = 0
    channels: int = 4
    classes: int = 0

    def __post_init__(self) -> None:
        for field, value in (("layers", self.layers), ("hidden", self.hidden), ("heads", self.heads)):
            if value <= 0:
                raise ValueError(f"{self.name}: {field} is {value}: expected a whole number above zero")
        for field, default in (
            ("kv_heads", self.heads),
            ("head_dim", self.hidden // self.heads),
            ("ffn", 4 * self.hidden),
        ):
            if not getattr(self, field):
                object.__setattr__(self, field, default)

    @property
    def tokens(self) -> int:
        """Tokens that a sample has: of a DiT fixed by its image, of a language model at most ``positions``."""
        return (self.image // 8 // self.patch) ** 2 if self.family is Family.DIT else self.positions

    @property
    def parameters(self) -> int:
        """How many parameters the model has, counted from its dimensions; tied ones once."""
        return self.layers * self.block_parameters + _outside_blocks(self)

    @property
    def block_parameters(self) -> int:
        """How many parameters one block has."""
        return _in_block(self)


# --- counting -------------------------------------------------------------------------------------------------


def _in_block(dims: ModelDims) -> int:
    h, f = dims.hidden, dims.ffn
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    match dims.family:
        case Family.GPT2 | Family.OPT | Family.GPT_NEOX | Family.ROBERTA:
            return 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h  # attention, MLP, two norms with bias
        case Family.DIT:
            return 4 * h * h + 4 * h + 2 * h * f + f + h + 6 * h * h + 6 * h  # norms have none; adaLN modulation
    gated = h * q + 2 * h * kv + q * h + 3 * h * f
    norms = 4 * h if dims.family is Family.GEMMA2 else 2 * h
    if dims.family is Family.QWEN2:
        norms += q + 2 * kv  # biases of query, key and value
    if dims.family is Family.QWEN3:
        norms += 2 * dims.head_dim  # norms of query and key
    return gated + norms


def _outside_blocks(dims: ModelDims) -> int:
    h = dims.hidden
    match dims.family:
        case Family.GPT2:
            return (dims.vocab + dims.positions) * h + 2 * h
        case Family.OPT:
            return (dims.vocab + dims.positions + 2) * h + 2 * h  # OPT's positions start at 2
        case Family.GPT_NEOX:
            return 2 * dims.vocab * h + 2 * h
        case Family.ROBERTA:
            embeddings = (dims.vocab + dims.positions + 2 + 1) * h + 2 * h  # positions start at 2; one token type
            return embeddings + h * h + h + 2 * h + dims.vocab  # the head has a layer and a norm, and a bias per token
        case Family.DIT:
            cells = dims.patch**2 * dims.channels
            embeddings = cells * h + h + 256 * h + h + h * h + h + (dims.classes + 1) * h
            return embeddings + 2 * h * h + 2 * h + h * cells + cells
    return (1 if dims.tied else 2) * dims.vocab * h + h


# --- building -------------------------------------------------------------------------------------------------


def build(dims: ModelDims, layers: int | None = None, *, dropout: float = 0.0) -> nn.Module:
    """The real model of ``dims`` on ``meta`` in training mode, with ``layers`` blocks where given.

    Hugging Face's class, or our ``DiT``. Raises ``ImportError`` that says what to install without transformers.
    """
    if layers is not None:
        dims = dataclasses.replace(dims, layers=layers)
    if dims.family is Family.DIT:
        with torch.device("meta"):
            return DiT(
                width=dims.hidden,
                heads=dims.heads,
                depth=dims.layers,
                latent=dims.image // 8,
                channels=dims.channels,
                patch=dims.patch,
                classes=dims.classes,
            ).train()
    return model_from_config(_config(dims, dropout))


def model_from_config(config: Any) -> nn.Module:
    """The causal language model of a Hugging Face ``config``, of RoBERTa the masked one, on ``meta``, in training mode,
    without a cache; what it returns has names, without which transformers' own models do not run."""
    transformers = _transformers()
    config.use_cache = False
    config.return_dict = True
    masked = config.model_type == Family.ROBERTA
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config, dtype=torch.float32)
    return model.train()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("building a language model needs transformers: pip install 'lohan-fx[hf]'") from error
    return transformers


def _config(dims: ModelDims, dropout: float) -> Any:
    auto = _transformers().AutoConfig.for_model
    sizes: dict[str, Any] = {"vocab_size": dims.vocab}
    match dims.family:
        case Family.GPT2:
            sizes |= {"n_layer": dims.layers, "n_embd": dims.hidden, "n_head": dims.heads, "n_inner": dims.ffn}
            sizes |= {"n_positions": dims.positions}
            sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
            return auto(dims.family.value, **sizes)
        case Family.OPT:
            sizes |= {"max_position_embeddings": dims.positions}
            sizes |= {"ffn_dim": dims.ffn, "word_embed_proj_dim": dims.hidden, "dropout": dropout}
        case Family.ROBERTA:  # its positions start at 2
            sizes |= {"max_position_embeddings": dims.positions + 2, "type_vocab_size": 1}
            sizes |= {"intermediate_size": dims.ffn}
            sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        case _:
            sizes |= {"max_position_embeddings": dims.positions}
            sizes |= {"intermediate_size": dims.ffn, "attention_dropout": dropout, "tie_word_embeddings": dims.tied}
    if dims.family not in (Family.OPT, Family.GPT_NEOX, Family.ROBERTA):
        sizes |= {"num_key_value_heads": dims.kv_heads, "head_dim": dims.head_dim}
    if dims.family is Family.PHI3:
        sizes |= {"pad_token_id": None}
    if dims.family is Family.GPT_NEOX:
        sizes |= {"hidden_dropout": dropout}
    return auto(
        dims.family.value,
        hidden_size=dims.hidden,
        num_hidden_layers=dims.layers,
        num_attention_heads=dims.heads,
        **sizes,
    )
