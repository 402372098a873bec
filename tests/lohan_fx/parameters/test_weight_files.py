"""Weights from safetensors: whole or not at all, and piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lohan_fx
from lohan_fx.parameters import weight_files
from lohan_fx.parameters.weight_files import open_weights
from tests.end_to_end.models import LLAMA, llama
from tests.tiny import Tiny, profile, same_weights

pytestmark = pytest.mark.filterwarnings("ignore:the hardware profile")


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


def _compiled(model: nn.Module, nvme: Path, weights: Any) -> nn.Module:
    return lohan_fx.compile(
        model, profile(), nvme=nvme, compute_dtype=torch.float32, host_memory="1GiB", weights=weights
    )


def _shards(folder: Path, values: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    names = sorted(values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: values[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("form", ["file", "list", "folder", "shards"])
def test_a_model_gets_the_weights_of_files(form: str, device: str, nvme: Path, tmp_path: Path) -> None:
    expected = Tiny()
    values = expected.state_dict()
    if form == "shards":
        weights: Any = _shards(tmp_path / "saved", values)
    else:
        folder = tmp_path / "saved"
        folder.mkdir()
        save_file(values, folder / "model.safetensors")
        file = folder / "model.safetensors"
        weights = {"file": str(file), "list": [file], "folder": folder}[form]
    torch.manual_seed(99)
    with torch.device(device):
        model = Tiny()
    same_weights(lohan_fx.release(_compiled(model, nvme, weights)), expected)


def test_a_saved_language_model_goes_on_meta_with_tied_weights_and_rotary_buffers(nvme: Path, tmp_path: Path) -> None:
    expected = LLAMA.build()
    expected.save_pretrained(tmp_path / "saved")
    with torch.device("meta"):
        model = llama()
    _compiled(model, nvme, tmp_path / "saved")
    inputs = LLAMA.batch()
    with torch.no_grad():
        assert torch.equal(model(**inputs).loss, expected(**inputs).loss)
    lohan_fx.release(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bf16_files_and_pieces_smaller_than_a_parameter(nvme: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 8192)
    expected = nn.Linear(128, 100).bfloat16()
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    model = nn.Linear(128, 100)
    same_weights(lohan_fx.release(_compiled(model, nvme, tmp_path / "model.safetensors")), expected.float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("layers.0.bias"), "missing: layers.0.bias"),
        (lambda v: v.update(extra=torch.ones(2)), "unexpected: extra"),
        (lambda v: v.update({"layers.1.bias": torch.ones(3)}), r"layers\.1\.bias is \(3,\) there and \(16,\) here"),
    ],
)
def test_files_of_another_model(change: Any, words: str, nvme: Path, tmp_path: Path) -> None:
    values = dict(Tiny().state_dict())
    change(values)
    save_file(values, tmp_path / "w.safetensors")
    model = Tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        _compiled(model, nvme, tmp_path / "w.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not list(nvme.iterdir())


def test_tied_weights_that_differ_in_the_files(nvme: Path, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in llama().state_dict().items()}
    values["lm_head.weight"] += 1
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="one parameter in this model, and differ in the files"):
        _compiled(llama(), nvme, tmp_path / "w.safetensors")


def test_tied_weights_with_nan_at_the_same_places(nvme: Path, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in llama().state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        values[name][3, 5] = float("nan")
    save_file(values, tmp_path / "w.safetensors")
    model = _compiled(llama(), nvme, tmp_path / "w.safetensors")
    assert lohan_fx.release(model).get_parameter("lm_head.weight").isnan().nonzero().tolist() == [[3, 5]]
    values["lm_head.weight"][3, 6] = float("nan")
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="one parameter in this model, and differ in the files"):
        _compiled(llama(), nvme, tmp_path / "w.safetensors")


class Turned(nn.Module):
    """Its buffer is made by the constructor, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("turn", torch.ones(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.turn).square().mean()


def test_a_buffer_on_meta_that_is_not_saved_needs_another_way(nvme: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Turned())
    save_file({f"0.{name}": value for name, value in Turned().state_dict().items()}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"0\.turn .*persistent=False: build the model in .*initialize=") as refused:
        _compiled(model, nvme, tmp_path / "w.safetensors")
    assert "weights=" not in str(refused.value)


def _damaged(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _file(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        _file({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 15),
        _file({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, b"\0" * 16),
        _file({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}, b"\0" * 16),
        _file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"\0" * 16),
        _file({"w": 3}, b"\0" * 16),
    ],
)
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"w\.safetensors is damaged"):
        open_weights(_damaged(tmp_path / "w.safetensors", content))


def test_a_dtype_that_is_not_supported_is_no_damage(tmp_path: Path) -> None:
    content = _file({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4)
    with pytest.raises(ValueError, match=r"w\.safetensors has w in F8_E4M3, which is not supported: save the model in"):
        open_weights(_damaged(tmp_path / "w.safetensors", content))


def test_what_is_no_weights(tmp_path: Path) -> None:
    for wrong in (7, [], [3]):
        with pytest.raises(TypeError, match=r"expected a \.safetensors file"):
            open_weights(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no \.safetensors file in"):
        open_weights(tmp_path)
    for nothing in ("", [""]):
        with pytest.raises(ValueError, match="weights has an empty text: name a file"):
            open_weights(nothing)
    with pytest.raises(ValueError, match="there is no file"):
        open_weights(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="nothing is ever unpickled"):
        open_weights(_damaged(tmp_path / "w.bin", b"x"))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../w.safetensors"}}')
    with pytest.raises(ValueError, match="leads out of its folder"):
        open_weights(tmp_path)
    with pytest.raises(ValueError, match="is the index of shards: name its folder"):
        open_weights(tmp_path / "model.safetensors.index.json")
