"""The least ``host_memory`` with which a model trains, as refusals name it, is enough in every phase, and for a resume.

    python benchmarks/least_promise.py [--nvme DIR --dtype float32 --cases 0,1] [--save]

Beginning with a promise of nothing, each refusal of ``compile`` or ``prepare`` names what would fit, until it does. That promise
then is the limit of ``within_promise.py``'s processes. Models are wide ones of few layers, whose embeddings are most of what
there is, and narrow ones, whose capture is. Bar: none takes more than was promised. A call without gradients, of which only a
second graph tells what it takes, may be refused (``refused``); training must go on within the promise then too.
JSON: ``cases``, each with ``promise_bytes``, ``most_bytes``, ``growth_bytes`` by phase, and ``refused``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from report import finish, own_folder, profile
from within_promise import built, compile_options, measured, parser_of

import lohan_fx
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planning.budgets import MIB

USUAL = "--batch 1 --seq 32"
CASES = {
    "350m, 2 layers": f"--size 350m --layers 2 {USUAL}",
    "350m, 2 layers, clipped, 2 backwards a step": f"--size 350m --layers 2 --clip --accumulation 2 {USUAL}",
    "demo, 4 layers, clipped, 2 backwards a step": f"--size demo --layers 4 --clip --accumulation 2 {USUAL}",
}
ATTEMPTS = 8
NAMED = re.compile(r"host_memory=([\d,]+) would fit|host_memory of at least ([\d,]+)|([\d,]+) bytes short")


def ask(args: argparse.Namespace) -> None:
    """Print what a refusal names, or null, as one JSON line."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, tokens = built(args)
    named = None
    try:
        hw = HardwareProfile.load(args.hw)
        lohan_fx.compile(model, hw, host_memory=args.host_memory, **compile_options(args))
        lohan_fx.prepare(model, input_ids=tokens, labels=tokens)
    except InfeasiblePlan as error:
        found = NAMED.search(str(error))
        if found is None:
            raise
        would_fit, at_least, short = (int((group or "0").replace(",", "")) for group in found.groups())
        named = would_fit or at_least or int(args.host_memory) + short
    lohan_fx.reset()
    print(json.dumps(named))


def least_promise(options: list[str], nvme: Path, hw: Path) -> int:
    """What is refused no more."""
    promise = MIB
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(dir=nvme) as folder:
            command = [sys.executable, __file__, *options, "--host-memory", str(promise), "--ask", "--nvme", folder]
            run = subprocess.run([*command, "--hw", str(hw)], stdout=subprocess.PIPE, text=True, check=True)
        named = json.loads(run.stdout.strip().splitlines()[-1])
        if named is None:
            return promise
        promise = named
    sys.exit(f"after {ATTEMPTS} refusals, each of the promise that the one before had named, {promise:,} would fit")


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--cases", default=",".join(str(number) for number in range(len(CASES))))
    parser.add_argument("--ask", action="store_true", help="internal: whether a promise would do")
    args = parser.parse_args()
    if args.ask:
        ask(args)
        return
    cases, lines, missed = [], [], []
    with own_folder(args):
        hw = args.nvme / "profile.toml"
        profile(args).save(hw)
        for number in args.cases.split(","):
            name, text = list(CASES.items())[int(number)]
            folder = args.nvme / f"case{number}"
            folder.mkdir()
            options = [*text.split(), "--dtype", args.dtype]
            options += ["--host-memory", str(least_promise(options, folder, hw))]
            asked = parser_of("").parse_args([*options, "--nvme", str(folder)])
            _, figures, over = measured(asked, hw, options)
            cases.append({"case": name, **figures})
            missed += [f"{name}: {what}" for what in over]
            text = f"{figures['promise_bytes'] / 1e6:,.0f} MB, at most {figures['most_bytes'] / 1e6:,.0f}"
            lines.append((name, "; ".join([text, *(f"{what}: {error}" for what, error in figures["refused"].items())])))
    finish("least_promise", lines, {"cases": cases}, missed, save=args.save)


if __name__ == "__main__":
    main()
