"""model_source: what --model names: presets, configs, functions; and what is wrong with it, in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lohan_fx.models.model_families import Family
from lohan_fx.models.model_presets import named
from lohan_fx.models.model_source import UserCodeError, source_of

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
    "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
FUNCTIONS = """
import torch
from torch import nn

def sized(batch=4, seq=16):
    return nn.Embedding(8, 8), {"input": torch.zeros(batch, seq, dtype=torch.long)}

def fixed():
    return nn.Linear(8, 8), {"input": torch.zeros(3, 8)}

def raises():
    raise KeyError("no weights here")

def leaves():
    raise SystemExit(3)

def nothing():
    return nn.Linear(8, 8), {}

def one():
    return nn.Linear(8, 8)
"""


def folder(tmp_path: Path, **changes: Any) -> str:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "planned_models.py"
    path.write_text(FUNCTIONS)
    yield str(path)
    sys.modules.pop("planned_models", None)


# --- presets --------------------------------------------------------------------------------------------------


def test_a_preset_with_the_usual_shape() -> None:
    found = source_of("gpt2").make(2, None)
    assert (found.samples, found.tokens, found.unit) == (2, 2048, "tokens")
    assert found.inputs["input_ids"].shape == (2, 1024)
    assert sum(p.numel() for p in found.model.parameters()) == named("gpt2").parameters


def test_a_dit_counts_images() -> None:
    found = source_of("dit-s-2").make(3, None)
    assert (found.samples, found.tokens, found.unit) == (3, 3 * 256, "images")
    assert source_of("dit-s-2").dims is not None
    with pytest.raises(ValueError, match=r"--seq is 100: a sample of dit-s-2 has 256 tokens"):
        source_of("dit-s-2").make(1, 100)


def test_a_sequence_longer_than_the_positions() -> None:
    with pytest.raises(ValueError, match=r"--seq is 1025: gpt2 has positions for 1024"):
        source_of("gpt2").make(1, 1025)


def test_an_unknown_model_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"no model preset 'llama-3.1-8'; did you mean 'llama-3.1-8b'"):
        source_of("llama-3.1-8")


def test_a_name_of_the_hub_is_no_folder() -> None:
    with pytest.raises(ValueError, match=r"there is no folder meta-llama/Llama-3.1-8B"):
        source_of("meta-llama/Llama-3.1-8B")


# --- configs --------------------------------------------------------------------------------------------------


def test_a_config_folder_makes_the_model_on_meta(tmp_path: Path) -> None:
    source = source_of(folder(tmp_path))
    found = source.make(2, 32)
    assert source.name == tmp_path.name
    assert type(found.model).__name__ == "LlamaForCausalLM"
    assert all(p.is_meta for p in found.model.parameters())
    assert (found.samples, found.tokens) == (2, 64)
    assert source.make(None, None).tokens == 256


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantized weights (bitsandbytes), "),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized weights, "),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantized weights (compressed-tensors), "),
        ({"quantization_config": None}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_config_of_quantized_weights_is_planned_without_and_says_so(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    found = source_of(folder(tmp_path, **settings)).make(1, 32)
    plain = source_of(folder(tmp_path)).make(1, 32)
    assert [p.shape for p in found.model.parameters()] == [p.shape for p in plain.model.parameters()]
    assert says in "".join(found.notes) and len(found.notes) == bool(says)


def test_old_names_of_settings_count(tmp_path: Path) -> None:
    old = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert source_of(str(tmp_path / "config.json")).make(1, None).tokens == 64


def test_configs_as_transformers_saves_them(tmp_path: Path) -> None:
    """Bamba's steps have no limit, which is no number of JSON's; Gemma 3n has a width for each layer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
    for config in (
        transformers.BambaConfig(**sizes, num_key_value_heads=2, mamba_n_heads=2, mamba_d_head=32, mamba_n_groups=1),
        transformers.Gemma3nTextConfig(
            **sizes, intermediate_size=[64, 96], activation_sparsity_pattern=[0.0, 0.0], num_kv_shared_layers=0
        ),
    ):
        config.save_pretrained(tmp_path)
        assert sum(p.numel() for p in source_of(str(tmp_path)).make(1, 16).model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, 'has no "model_type"'),
        ({"model_type": "llamb"}, "knows no \"model_type\" 'llamb'"),
        ({"hidden_size": ...}, 'has no "hidden_size": add it; transformers takes 4096 where it is missing'),
        ({"num_hidden_layers": ...}, 'has no "num_hidden_layers"'),
        ({"num_hidden_layers": 0}, '"num_hidden_layers" is 0: expected a whole number from 1'),
        ({"num_hidden_layers": 10**9}, '"num_hidden_layers" is 1000000000'),
        ({"hidden_size": -64}, '"hidden_size" is -64'),
        ({"hidden_size": "64"}, "\"hidden_size\" is '64'"),
        ({"vocab_size": 3.5}, '"vocab_size" is 3.5'),
        ({"num_attention_heads": True}, '"num_attention_heads" is True'),
        ({"intermediate_size": 0}, '"intermediate_size" is 0'),
        ({"intermediate_size": [128, 0]}, '"intermediate_size" is 0'),
        ({"rope_theta": {"__float__": None}}, "is not JSON of a config"),
        ({"num_attention_heads": 5}, "transformers"),
        ({"hidden_act": "nonsense"}, "cannot build a causal language model"),
    ],
)
def test_a_config_with_missing_or_absurd_fields(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        source_of(folder(tmp_path, **changes)).make(1, 16)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mamba", **{**SIZES, "num_attention_heads": ...}},
            r"language models with attention are planned; give --model FILE\.py",
        ),
        (
            {"model_type": "vit", **{**SIZES, "vocab_size": ...}},
            r'"vocab_size": from a config only .*FILE\.py:FUNCTION',
        ),
        ({"model_type": "gemma3", "text_config": SIZES}, r'its "text_config", as a config.json of its own, can be'),
        (
            {"model_type": "clip_text_model", **SIZES},
            r"'clip_text_model' is no causal language model .*FILE\.py:FUNCTION",
        ),
    ],
)
def test_a_config_of_another_kind_says_how_else(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=message) as caught:
        source_of(str(tmp_path)).make(1, 16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["roberta", "camembert", "xlm-roberta"])
def test_positions_that_are_counted_from_the_paddings(tmp_path: Path, kind: str) -> None:
    config = {"model_type": kind, **SIZES, "intermediate_size": 64, "max_position_embeddings": 34, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = source_of(str(tmp_path))
    found = source.make(2, None)
    assert found.tokens == 64
    found.model(**{name: value.to("meta") for name, value in found.inputs.items()})
    with pytest.raises(ValueError, match="has positions for 32; choose a shorter sequence"):
        source.make(2, 33)


def test_other_words_for_the_longest_sequence(tmp_path: Path) -> None:
    """XLNet has -1 positions, which stands for no limit."""
    sizes = {"d_model": 32, "n_heads": 2, "n_head": 2, "vocab_size": 96}
    for config in (
        {"model_type": "mpt", "n_layers": 2, "max_seq_len": 64},
        {"model_type": "xlnet", "n_layer": 2, "d_inner": 64},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
        source = source_of(str(tmp_path))
        if config["model_type"] == "mpt":
            assert source.make(1, None).tokens == 64
            with pytest.raises(ValueError, match="has positions for 64; choose a shorter sequence"):
                source.make(1, 65)
        else:
            assert source.make(1, None).tokens == 1024


def test_a_config_of_a_model_that_returns_tuples(tmp_path: Path) -> None:
    """Transformers' own models do not run so."""
    source = source_of(folder(tmp_path, return_dict=False))
    found = source.make(1, 8)
    assert found.model.to_empty(device="cpu")(**found.inputs).loss is not None


def test_a_config_of_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """Its class for causal language models would be the decoder alone."""
    bart = {"model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 96}
    bart |= {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(bart))
    with pytest.raises(ValueError, match=r"'bart' has an encoder and a decoder.*give --model FILE\.py:FUNCTION"):
        source_of(str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[1]", "expected a JSON object")])
def test_a_config_that_is_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        source_of(str(tmp_path))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        source_of(str(tmp_path))


# --- functions ------------------------------------------------------------------------------------------------


def test_a_function_gets_the_sizes_that_it_takes_and_makes_nothing_real(functions: str) -> None:
    found = source_of(f"{functions}:sized").make(2, None)
    assert (found.samples, found.tokens, found.unit) == (2, 32, "tokens")
    assert all(p.is_meta for p in found.model.parameters())
    found = source_of(f"{functions}:fixed").make(None, None)
    assert (found.samples, found.tokens, found.unit) == (3, 3, "samples")


def test_a_function_that_takes_no_batch(functions: str) -> None:
    asks = "--batch, --best-batch and --vary batch"
    with pytest.raises(
        ValueError, match=rf"batch=2 is asked for, but .*:fixed decides that itself.*, or leave out {asks}$"
    ):
        source_of(f"{functions}:fixed").make(2, None)


def test_what_a_function_raises_is_kept(functions: str) -> None:
    with pytest.raises(UserCodeError, match="failed: KeyError: 'no weights here'") as caught:
        source_of(f"{functions}:raises").make(None, None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_ends_the_process_is_one_that_raises(functions: str) -> None:
    with pytest.raises(UserCodeError, match="failed: SystemExit: 3"):
        source_of(f"{functions}:leaves").make(None, None)


@pytest.mark.parametrize(
    ("function", "message"), [("one", "expected a pair"), ("nothing", "no tensor"), ("x", "has no function")]
)
def test_a_function_of_another_kind(functions: str, function: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        source_of(f"{functions}:{function}").make(None, None)


def test_families_of_configs_and_presets_are_the_same() -> None:
    from transformers import CONFIG_MAPPING

    assert [family for family in Family if family is not Family.DIT and family.value not in CONFIG_MAPPING] == []
    assert torch.get_default_device() == torch.device("cpu")
