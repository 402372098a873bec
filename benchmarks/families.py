"""Are the numbers right? Small models of Hugging Face's families, trained by us and by plain PyTorch from the same seeds.

    python benchmarks/families.py [--families llama,t5 --policies swap-nvme,recompute --lengths 16,24,20,11] [--save]

Each trains three steps in fp32, dropout included, under one of the policies in turn, and must end with the losses and weights of
eager PyTorch, bit by bit. Some of Hugging Face's code does something else when it is traced (another attention, for one): there
they must be those of ``torch.compile(backend="aot_eager")``, which differs from eager as much. What ``torch.compile`` cannot
trace as one graph we must refuse, and we refuse sizes that depend on values, since no memory can be planned for them. Fails on
any other numbers, and on any other refusal. With ``--lengths`` that differ, batches of text do, one a step, whose graphs hold for
many sizes (docs/0048).
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from report import arguments, finish, own_folder, profile
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import CaptureError
from lohan_fx.hardware import HardwareProfile

LENGTHS = (16, 16, 16)
LR = 1e-3
HOST_MEMORY = "2GiB"
POLICIES = "lohan,swap-nvme,recompute"
EAGER, TRACED, UNTRACEABLE, UNPLANNED = "as eager", "as aot_eager", "not traceable", "sizes depend on values"
WRONG, REFUSED, FAILED = "OTHER NUMBERS", "REFUSED", "FAILED"

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "head_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "n_ctx": 64, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "dim": 32,
    "hidden_dim": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "rotary_dim": 8, "state_size": 8,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "embedding_size": 32,
    "attention_hidden_size": 32, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "sliding_window": 16, "image_size": 32, "patch_size": 8, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
"""What makes a model small, by all the names that families have for it."""

OWN: dict[str, dict[str, Any]] = {
    "rwkv": {"context_length": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "esm": {"mask_token_id": 4, "pad_token_id": 1},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    "convnext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "convnextv2": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
}
"""What single families need besides."""


def text(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, SMALL["vocab_size"], (2, length))
    return {"input_ids": tokens, "labels": tokens}


def images(length: int) -> dict[str, torch.Tensor]:
    del length
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}


@dataclass(frozen=True)
class Kind:
    """Families that are trained alike."""

    auto: str
    batch: Callable[[int], dict[str, torch.Tensor]]
    families: str


KINDS = (
    Kind(
        "AutoModelForCausalLM",
        text,
        "biogpt bloom codegen cohere ctrl ernie4_5 exaone4 falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode "
        "gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium jetmoe lfm2 llama mamba minimax mistral mixtral mpt nemotron "
        "olmo olmo2 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma rwkv smollm3 "
        "stablelm starcoder2 xglm",
    ),
    Kind(
        "AutoModelForMaskedLM",
        text,
        "albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra esm fnet ibert layoutlm longformer "
        "megatron-bert mobilebert modernbert mpnet nystromformer rembert roberta roformer squeezebert xlm yoso",
    ),
    Kind(
        "AutoModelForSeq2SeqLM",
        text,
        "bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 nllb-moe pegasus plbart "
        "switch_transformers t5 umt5",
    ),
    Kind(
        "AutoModelForImageClassification",
        images,
        "beit bit convnext convnextv2 data2vec-vision dinov2 focalnet ijepa mobilenet_v2 mobilevit poolformer regnet resnet vit "
        "vit_msn",
    ),
)


def build(family: str, kind: Kind) -> nn.Module:
    """A small model of ``family``, the same at each call."""
    of_family = transformers.CONFIG_MAPPING[family]
    default = of_family()
    options = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    if kind.auto == "AutoModelForSeq2SeqLM":
        options["decoder_start_token_id"] = 0
    torch.manual_seed(0)
    model = getattr(transformers, kind.auto).from_config(of_family(**{**options, **OWN.get(family, {})}))
    return model.train()  # type: ignore[no-any-return]


def train(model: Callable[..., Any], optimizer: Any, kind: Kind, lengths: Sequence[int]) -> list[float]:
    """The losses of a step for each of ``lengths``."""
    torch.manual_seed(1)
    losses = []
    for length in lengths:
        loss = model(**kind.batch(length)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


Trained = tuple[list[float], Mapping[str, torch.Tensor]]


def plain(family: str, kind: Kind, lengths: Sequence[int], *, traced: bool) -> Trained:
    """Losses and weights of eager PyTorch, or of ``aot_eager``, traced for each shape."""
    model = build(family, kind)
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False) if traced else model
    return train(call, torch.optim.AdamW(model.parameters(), lr=LR), kind, lengths), model.state_dict()


def streamed(
    family: str, kind: Kind, policy: str, lengths: Sequence[int], hw: HardwareProfile, nvme: Path
) -> tuple[Trained, int]:
    """Ours, and how many plans that took."""
    model = build(family, kind)
    torch._dynamo.reset()
    options: dict[str, Any] = {
        "nvme": nvme,
        "compute_dtype": torch.float32,
        "host_memory": HOST_MEMORY,
        "policy": policy,
    }
    with lohan_fx.releasing(lohan_fx.compile(model, hw, **options)):
        losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), kind, lengths)
        return (losses, copy.deepcopy(model.state_dict())), len(compiled(model).plans)


def judged(
    family: str, kind: Kind, policy: str, lengths: Sequence[int], hw: HardwareProfile, nvme: Path
) -> dict[str, Any]:
    """How the numbers of one family compare."""
    found: dict[str, Any] = {"family": family, "policy": policy}
    eager = plain(family, kind, lengths, traced=False)
    try:
        ours, found["plans"] = streamed(family, kind, policy, lengths, hw, nvme)
    except CaptureError as error:
        return {**found, "verdict": _refusal(family, kind, lengths, error), "why": in_short(error)}
    except Exception as error:
        return {**found, "verdict": FAILED, "why": in_short(error)}
    found["losses"] = ours[0]
    if _equal(ours, eager):
        return {**found, "verdict": EAGER}
    away = max(abs(a - b) for a, b in zip(ours[0], eager[0], strict=True))
    traced = plain(family, kind, lengths, traced=True)
    return {**found, "verdict": TRACED if _equal(ours, traced) else WRONG, "loss_apart_from_eager": away}


def _refusal(family: str, kind: Kind, lengths: Sequence[int], why: CaptureError) -> str:
    if "depends on values and not on input shapes" in str(why):
        return UNPLANNED
    try:
        plain(family, kind, lengths, traced=True)
    except Exception:
        return UNTRACEABLE
    return REFUSED


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def _equal(one: Trained, other: Trained) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], value) for name, value in other[1].items())


def lengths_of(given: str) -> tuple[int, ...]:
    """As the type of an argument."""
    if not all(number.isdecimal() and int(number) for number in given.split(",")):
        raise argparse.ArgumentTypeError(f"{given!r} are no lengths: give some from 1 on, such as 16,24")
    return tuple(int(number) for number in given.split(","))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--families", help="only these, such as llama,t5")
    parser.add_argument("--policies", default=POLICIES, help="families take them in turn")
    parser.add_argument(
        "--lengths", type=lengths_of, default=LENGTHS, help="tokens of each step's texts, such as 16,24"
    )
    args = parser.parse_args()
    every = [(family, kind) for kind in KINDS for family in kind.families.split()]
    asked = args.families.split(",") if args.families else [family for family, _ in every]
    if unknown := set(asked) - {family for family, _ in every}:
        parser.error(
            f"--families: {', '.join(sorted(unknown))} is not among {', '.join(family for family, _ in every)}"
        )
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with own_folder(args):
        cases = measured([each for each in every if each[0] in asked], args)
    verdicts = [case["verdict"] for case in cases]
    figures = {
        "families": len(cases), "of_families": len(every), "as_eager": verdicts.count(EAGER),
        "as_aot_eager": verdicts.count(TRACED), "not_traceable": verdicts.count(UNTRACEABLE),
        "sizes_depend_on_values": verdicts.count(UNPLANNED), "trained": cases,
    }  # fmt: skip
    missed = [f"{case['family']}: {case['verdict']}" for case in cases if case["verdict"] in (WRONG, REFUSED, FAILED)]
    rows = [
        (verdict, ", ".join(c["family"] for c in cases if c["verdict"] == verdict)) for verdict in sorted(set(verdicts))
    ]
    alike = len(set(args.lengths)) == 1
    figures["lengths"] = list(args.lengths)
    finish("families" if alike else "families_lengths", rows, figures, missed, save=args.save)


def measured(asked: list[tuple[str, Kind]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One after the other; each is told as it is done."""
    hw = profile(args, seconds=4.0)
    cases = []
    for (family, kind), policy in zip(asked, itertools.cycle(args.policies.split(",")), strict=False):
        case = judged(family, kind, policy, args.lengths, hw, args.nvme)
        print(f"{case['family']} ({policy}): {case['verdict']}", flush=True)
        cases.append(case)
        gc.collect()
    return cases


if __name__ == "__main__":
    main()
