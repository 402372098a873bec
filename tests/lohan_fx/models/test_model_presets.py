"""model_presets: dimensions by name, counted without building and built without allocating."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lohan_fx.models.dit import DiT, example_inputs
from lohan_fx.models.model_presets import MODELS, Family, build, named

ONE_PER_FAMILY = {dims.family: dims for dims in MODELS.values()}


@pytest.mark.parametrize("family", Family)
def test_parameters_counted_from_dimensions_are_those_of_the_model(family: Family) -> None:
    dims = dataclasses.replace(ONE_PER_FAMILY[family], layers=3)
    model = build(ONE_PER_FAMILY[family], layers=3)
    assert sum(p.numel() for p in model.parameters()) == dims.parameters
    assert all(p.is_meta for p in model.parameters())
    assert model.training


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-13b", 12.85),
        ("gpt3-175b", 174.6),
        ("gpt3-70b", 64.86),
        ("dit-0.67b", 0.675),
        ("llama-3.1-8b", 8.03),
        ("roberta-base", 0.1247),
    ],
)
def test_known_sizes(name: str, billions: float) -> None:
    assert named(name).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_an_encoder_learns_what_is_masked_and_looks_both_ways() -> None:
    model = build(named("roberta-base"), layers=1)
    assert type(model).__name__ == "RobertaForMaskedLM" and not model.config.is_decoder


def test_every_preset_says_where_its_numbers_come_from() -> None:
    assert [dims.name for dims in MODELS.values() if len(dims.source) < 5] == []


def test_an_unknown_model_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"no model preset 'gpt3-175'; did you mean 'gpt3-175b'"):
        named("gpt3-175")


def test_a_sample_of_a_dit_has_a_quarter_of_its_latent_as_tokens() -> None:
    assert named("dit-10b").tokens == 1024
    assert named("gpt3-13b").tokens == 2048


def test_a_dit_predicts_the_noise_and_learns() -> None:
    torch.manual_seed(0)
    model = DiT(width=32, heads=2, depth=2, latent=8, classes=10)
    inputs = {**example_inputs(2, 8), "latents": torch.randn(2, 4, 8, 8), "noise": torch.randn(2, 4, 8, 8)}
    first = model(**inputs)
    # adaLN-zero: at first the output is zero, whatever goes in.
    assert torch.equal(first.prediction, torch.zeros(2, 4, 8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    assert model(**inputs).loss < 0.9 * first.loss


def test_a_dit_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="the latent by the patch"):
        DiT(width=32, heads=2, depth=1, latent=7)
