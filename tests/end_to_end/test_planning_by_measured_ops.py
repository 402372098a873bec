"""Where the ops of a graph are timed, the search sees the same model as where they are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import ActivationGraph
from lohan_fx.passes.independent_parts import independent_parts
from lohan_fx.planning import plan_search
from tests.end_to_end.models import LLAMA
from tests.end_to_end.recipes import cpu_profile


def blocks_of(nvme: Path, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(copies, values) of each part of a Llama of two layers that the search decides on."""
    seen: list[ActivationGraph] = []
    original = plan_search.activation_graph
    monkeypatch.setattr(plan_search, "activation_graph", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1])
    nvme.mkdir()
    model = LLAMA.build()
    lohan_fx.compile(model, hw, nvme=[nvme], compute_dtype=torch.float32)
    with lohan_fx.releasing(model):
        lohan_fx.prepare(model, **LLAMA.batch())
    monkeypatch.undo()
    return [(part.count, len(part.seconds)) for part in independent_parts(seen[0])]


def test_layers_are_copies_of_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views take time, too, and all layers read views of one value: sine and cosine of the positions."""
    by_rates = blocks_of(tmp_path / "rates", cpu_profile(), monkeypatch)
    here = dataclasses.replace(cpu_profile(), machine=HardwareProfile.fingerprint())
    by_measured = blocks_of(tmp_path / "measured", here, monkeypatch)
    # Two ops alike by the rates may take different times.
    assert max(values for _, values in by_measured) == max(values for _, values in by_rates)
    assert sum(count * values for count, values in by_measured) == sum(count * values for count, values in by_rates)
