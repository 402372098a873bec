"""system_memory, max_model: what the papers' systems train and what they do not, by their own memory."""

from __future__ import annotations

import dataclasses

import pytest

from lohan_fx.forecasting.forecast import Asked
from lohan_fx.forecasting.max_model import limit_data, limit_text, relatives, system_limit
from lohan_fx.forecasting.system_memory import MEMORY, ZeroInfinityMemory
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.model_presets import MODELS, named
from lohan_fx.models.transformer_counts import TransformerCounts
from lohan_fx.policies import FORCED, POLICIES

GIB = 1 << 30
HW = HardwareProfile.preset("rtx4090-12xP5510")
GPT = relatives("gpt3-13b", named("gpt3-13b"))


def largest(policy: str, main_gib: int, gpu_gib: int = 24) -> str | None:
    asked = Asked(HW, policy, host_memory_bytes=main_gib * GIB, device_memory_bytes=gpu_gib * GIB)
    return system_limit(GPT, asked, 1024).largest


@pytest.mark.parametrize(
    ("policy", "main_gib", "model"),
    [
        ("lohan", 256, "gpt3-175b"),  # L-ME-11
        ("lohan", 768, "gpt3-276b"),  # L-ME-12
        ("fuyou", 768, "gpt3-276b"),
        ("zero-infinity", 768, "gpt3-135b"),  # L-ME-24
        ("flashneuron", 768, None),  # L-ES-04: at most 1.55B
        ("gemini", 768, "gpt3-70b"),  # L-ME-09: not 175B
    ],
)
def test_the_largest_model_of_each_system(policy: str, main_gib: int, model: str | None) -> None:
    assert largest(policy, main_gib) == model


def test_175b_also_on_16_gb() -> None:
    assert largest("lohan", 256, gpu_gib=16) == "gpt3-175b"  # L-ME-11: an RTX 4080


def test_412b_needs_a_larger_gpu() -> None:
    assert (largest("fuyou", 512, 24), largest("fuyou", 512, 80)) == ("gpt3-276b", "gpt3-412b")  # F-ME-06


@pytest.mark.parametrize(("model", "main_gib", "fits"), [("13b", 128, False), ("65b", 512, True), ("65b", 384, False)])
def test_what_zero_infinity_needs(model: str, main_gib: int, fits: bool) -> None:  # F-ME-06, F-ME-07
    needed = ZeroInfinityMemory().needs(TransformerCounts(named(f"gpt3-{model}"), 1, 1024))
    assert (needed.host_bytes <= main_gib * GIB) is fits


def test_more_memory_never_trains_less() -> None:
    for policy in MEMORY:
        sizes = [largest(policy, main) for main in (64, 128, 256, 512, 1024)]
        counted = [0 if size is None else named(size).parameters for size in sizes]
        assert counted == sorted(counted), policy


def test_all_memory_of_the_machine_unless_less_is_asked_for() -> None:
    limit = system_limit(GPT, Asked(HW), None)
    assert (limit.host_bytes, limit.device_bytes) == (HW.host_memory_bytes, HW.device_memory_bytes)
    assert limit.largest == limit_data(limit)["largest"] == "gpt3-276b"
    assert "largest by LoHan itself: gpt3-276b" in limit_text(limit)
    assert "of device" in limit_text(limit)  # what 412B lacks


def test_states_on_drives_need_drives() -> None:
    one = dataclasses.replace(Asked(HW), hw=dataclasses.replace(HW, nvme=HW.nvme[:1]))  # 3.84 TB
    limit = system_limit(GPT, one, None)
    assert limit.largest == "gpt3-175b" and "of nvme missing" in limit_text(limit)
    none = dataclasses.replace(Asked(HW), hw=dataclasses.replace(HW, nvme=()))
    for policy, needs_some in [("lohan", True), ("zero-infinity", True), ("gemini", True), ("zero-offload", False)]:
        assert (system_limit(GPT, dataclasses.replace(none, policy=policy), None).largest is None) is needs_some


def test_models_of_a_kind_by_size() -> None:
    sizes = [dims.parameters for dims in GPT]
    assert sizes == sorted(sizes) and {dims.name for dims in GPT} == {name for name in MODELS if name[:4] == "gpt3"}
    with pytest.raises(ValueError, match="--max-model needs a preset"):
        relatives("folder", None)


def test_a_model_with_fewer_positions_than_asked_for_is_none_of_the_kind() -> None:
    of_8b = named("llama-3.1-8b")
    names = [dims.name for dims in relatives("llama-3.1-8b", of_8b, 8192)]
    assert "llama-7b" not in names and names[-1] == "llama-3.1-405b" and of_8b.name in names
    assert {dims.tokens for dims in relatives("dit-xl-2", named("dit-xl-2"), 1024)} == {1024}
    with pytest.raises(
        ValueError, match=r"--seq is 9000000: no llama takes so many tokens; they take at most 4096, 131072"
    ):
        relatives("llama-3.1-8b", of_8b, 9_000_000)


def test_the_tokens_are_those_of_every_model() -> None:
    """Images of 256 pixels for some, of 512 for the others."""
    limit = system_limit(relatives("dit-xl-2", named("dit-xl-2")), Asked(HW), None)
    assert [row["tokens"] for row in limit_data(limit)["rows"]] == [row.tokens for row in limit.rows]
    assert {row.model: row.tokens for row in limit.rows}["dit-xl-2"] == 256
    assert "(batch 1, 256 to 1024 tokens," in limit_text(limit)
    assert "(batch 1, 512 tokens," in limit_text(system_limit(GPT, Asked(HW), 512))


def test_a_system_that_the_papers_say_too_little_of() -> None:
    limit = system_limit(GPT, dataclasses.replace(Asked(HW), policy="g10"), None)
    assert limit.largest is None and "say too little" in limit_text(limit) and not limit_data(limit)["known"]


@pytest.mark.parametrize("policy", [policy.name for policy in FORCED])
def test_what_is_ours_is_in_no_paper(policy: str) -> None:
    limit = system_limit(GPT, dataclasses.replace(Asked(HW), policy=policy), None)
    assert limit.largest is None and not limit_data(limit)["known"]
    assert limit_text(limit) == f"no paper has {policy}, which is ours: it has no limit of its own to tell"


def test_only_policies_of_the_papers_have_memory() -> None:
    assert set(MEMORY) <= set(POLICIES) - {policy.name for policy in FORCED}
