"""Do they say the same? Small models of Hugging Face's families generate greedily, streamed by us and in plain PyTorch.

    python benchmarks/generates.py [--families llama,t5] [--save]

With a cache of keys and values and without, in fp32, after large random weights, so that the words differ. ``generate`` of an
encoder and a decoder calls the encoder by itself (docs/0046). What Dynamo cannot trace as one graph we must refuse, and we refuse
sizes that depend on values and models that edit their parameters. Fails on any other words, and on any other refusal.
"""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAILED, HOST_MEMORY, KINDS, REFUSED, SMALL, UNPLANNED, UNTRACEABLE, Kind, build, in_short
from report import arguments, finish, own_folder, profile, with_saved
from torch import nn

import lohan_fx
from lohan_fx.errors import CaptureError
from lohan_fx.hardware import HardwareProfile

AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
WORDS = 4
STD = 0.15
SAME, OTHER, NOT_EAGER = "the same words", "OTHER WORDS", "plain PyTorch does not"
EDITS = "edits its parameters"


def speaking(family: str, kind: Kind) -> Any:
    """A small model of ``family`` whose next word is not always the last one."""
    model = build(family, kind).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=STD)
    return model


def words(model: Any, *, use_cache: bool) -> torch.Tensor:
    """(2, its words) of two texts, greedily."""
    torch.manual_seed(1)
    ids = torch.randint(3, SMALL["vocab_size"], (2, 12))
    found: torch.Tensor = model.generate(
        ids, max_new_tokens=WORDS, min_new_tokens=WORDS, do_sample=False, use_cache=use_cache
    )
    return found


def judged(family: str, kind: Kind, use_cache: bool, hw: HardwareProfile, nvme: Path) -> dict[str, Any]:
    """What one family says."""
    name = f"{family} {'with' if use_cache else 'without'} cache"
    found: dict[str, Any] = {"case": name, "family": family}
    torch._dynamo.reset()
    try:
        wanted = words(speaking(family, kind), use_cache=use_cache)
    except Exception as error:
        return {**found, "verdict": NOT_EAGER, "why": in_short(error)}
    model = speaking(family, kind)
    options: dict[str, Any] = {"nvme": nvme, "compute_dtype": torch.float32, "host_memory": HOST_MEMORY}
    try:
        with lohan_fx.releasing(lohan_fx.compile(model, hw, **options)):
            said = words(model, use_cache=use_cache)
    except CaptureError as error:
        return {**found, "verdict": _refusal(family, kind, use_cache, error), "why": in_short(error)}
    except Exception as error:
        return {**found, "verdict": FAILED, "why": in_short(error)}
    return {**found, "verdict": SAME if torch.equal(said, wanted) else OTHER, "different_words": len(said.unique())}


def _refusal(family: str, kind: Kind, use_cache: bool, why: CaptureError) -> str:
    """Whether ``torch.compile`` refuses the same, as one graph."""
    if "depends on values and not on input shapes" in str(why):
        return UNPLANNED
    if "edits its parameter" in str(why):
        return EDITS
    torch._dynamo.reset()
    model = speaking(family, kind)
    called: list[nn.Module] = [model, model.get_encoder()] if kind.auto == AUTO[1] else [model]
    for module in called:
        module.compile(backend="aot_eager", fullgraph=True)
    try:
        words(model, use_cache=use_cache)
    except Exception:
        return UNTRACEABLE
    return REFUSED


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--families", help="only these, such as llama,t5")
    args = parser.parse_args()
    every = {family: kind for kind in KINDS if kind.auto in AUTO for family in kind.families.split()}
    asked = args.families.split(",") if args.families else list(every)
    if unknown := set(asked) - set(every):
        parser.error(f"--families: {', '.join(sorted(unknown))} is not among {', '.join(every)}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    hw, said = profile(args, seconds=4.0), []
    with own_folder(args):
        for family in asked:
            for use_cache in (True, False):
                said.append(judged(family, every[family], use_cache, hw, args.nvme))
                print(f"{said[-1]['case']}: {said[-1]['verdict']}", flush=True)
                gc.collect()
    cases = with_saved("generates", said) if args.save else said
    verdicts = [case["verdict"] for case in cases]
    figures = {
        "families": len({case["family"] for case in cases}), "of_families": len(every), "same": verdicts.count(SAME),
        "not_traceable": verdicts.count(UNTRACEABLE), "sizes_depend_on_values": verdicts.count(UNPLANNED),
        "edits_parameters": verdicts.count(EDITS), "not_eager": verdicts.count(NOT_EAGER), "cases": cases,
        "of_cases": 2 * len(every),
    }  # fmt: skip
    missed = [f"{case['case']}: {case['verdict']}" for case in cases if case["verdict"] in (OTHER, REFUSED, FAILED)]
    rows = [(one, ", ".join(case["case"] for case in cases if case["verdict"] == one)) for one in sorted(set(verdicts))]
    finish("generates", rows, figures, missed, save=args.save)


if __name__ == "__main__":
    main()
