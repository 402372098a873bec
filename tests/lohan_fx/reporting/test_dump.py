"""What ``dump`` shows of compiled models: against golden texts (see conftest.py), and against the graphs."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Plan
from lohan_fx.planning.disk_space import disk_bytes
from lohan_fx.reporting.listing import dtype_name, op_name, type_of

NODE = re.compile(r"    (?:\w+: .+ = .+\(.*\)|return .*)")


Compiled = Callable[..., nn.Module]


@contextmanager
def compiling(directory: Path) -> Iterator[Compiled]:
    """``compiled(model, policy, ..., **inputs)``: the model, compiled and captured; released at the end."""
    models: list[nn.Module] = []

    def compile_one(
        model: nn.Module, policy: str, *, checkpoints: int = 0, dynamic: bool | None = None, **inputs: torch.Tensor
    ) -> nn.Module:
        own = directory / str(len(models))
        own.mkdir()
        options: dict[str, Any] = {
            "host_memory": "2GiB",
            "policy": policy,
            "checkpoints": checkpoints,
            "dynamic": dynamic,
        }
        lohan_fx.compile(model, hw(), nvme=[own], **options)
        models.append(model)
        lohan_fx.prepare(model, **inputs)
        return model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the hardware profile .* was not measured on this machine")
        yield compile_one
    for model in models:
        lohan_fx.release(model)
    torch._dynamo.reset()


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[Compiled]:
    with compiling(tmp_path) as compile_one:
        yield compile_one


def hw() -> lohan_fx.HardwareProfile:
    profile = lohan_fx.HardwareProfile.preset("rtx4090-12xP5510")
    return dataclasses.replace(profile, device="cpu", host_memory_bytes=16 << 30)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 1024, bias=False)
        self.down = nn.Linear(1024, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Residual layers with weights that are large enough to leave the device, and a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(compiled: Compiled, policy: str, *, layers: int = 5, dynamic: bool | None = None) -> nn.Module:
    return compiled(Stack(layers), policy, dynamic=dynamic, x=torch.zeros(8, 64, dtype=torch.bfloat16))


def llama(compiled: Compiled, policy: str, *, layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
        max_position_embeddings=64,
    )
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return compiled(transformers.LlamaForCausalLM(config).train(), policy, input_ids=ids, labels=ids)


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    with compiling(tmp_path_factory.mktemp("nvme")) as compile_one:
        yield llama(compile_one, "swap-nvme", layers=6)


def halves_of(model: nn.Module) -> Halves:
    found: Any = model._lohan_fx
    shown: Halves = found.halves[-1]
    return shown


def node_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if NODE.fullmatch(line)]


def titles(text: str) -> list[str]:
    return [line.removeprefix("  # ") for line in text.splitlines() if line.startswith("  # ")]


# --- golden texts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["swap-nvme", "recompute"])
def test_a_small_model(policy: str, compiled: Compiled, check_golden: Callable[[str, str], None]) -> None:
    check_golden(f"stack_{policy}", lohan_fx.dump(stack(compiled, policy)))


@pytest.mark.slow
def test_a_llama(compiled: Compiled, check_golden: Callable[[str, str], None]) -> None:
    """Its graph depends on the versions of PyTorch and transformers: those of constraints.txt made the golden text."""
    constraints = Path(__file__).parents[3] / "constraints.txt"
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints.read_text(), re.MULTILINE))
    for package in ("torch", "transformers"):
        if version(package).split("+")[0] != pinned[package]:
            pytest.skip(f"the golden text is for {package} {pinned[package]}")
    check_golden("llama_recompute", lohan_fx.dump(llama(compiled, "recompute", layers=2)))


# --- folding --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_layers_are_shown_once(six_layers: nn.Module) -> None:
    text = lohan_fx.dump(six_layers)
    folded = [title for title in titles(text) if "equal" in title and not title.startswith("inputs")]
    assert len(folded) >= 2  # forward and backward
    # The first layer prepares the mask and the last one fetches what comes after the layers.
    assert {"model.layers.0", "model.layers.5"} <= set(titles(text))
    assert "fetch(model.layers.{i+" in text
    assert "fetch(model.layers.{i-" in text  # in the backward the next layer is the one before
    assert "offload_grad(" in text and "-> model.layers.{i}.mlp.up_proj.weight)" in text
    assert re.search(r"swap_out\(\w+ -> nvme\)", text) and re.search(r"swap_in\(\w+ <- nvme\)", text)


@pytest.mark.slow
def test_unfolded_every_node_has_a_line(six_layers: nn.Module) -> None:
    folded, unfolded = lohan_fx.dump(six_layers), lohan_fx.dump(six_layers, unfold=True)
    names = [node.name for _, gm in halves_of(six_layers).graphs() for node in gm.graph.nodes if node.op != "output"]
    listed = [line.split(":")[0].strip() for line in node_lines(unfolded) if not line.startswith("    return")]
    assert listed == names
    assert len(node_lines(unfolded)) == len(names) + 2
    assert len(node_lines(folded)) < len(names)
    assert {f"model.layers.{n}" for n in range(6)} <= set(titles(unfolded))
    assert "equal" not in unfolded
    assert "{i" not in unfolded


def test_recomputed_ops_are_named_so(compiled: Compiled) -> None:
    text = lohan_fx.dump(stack(compiled, "recompute", layers=2))
    backward = text.partition("backward: ")[2]
    assert re.search(r"recompute_mm\w*: bf16\[8, 1024\] = aten.mm\(", backward)
    assert re.search(r"recompute_relu\w*: bf16\[8, 1024\] = aten.relu\(recompute_mm", backward)
    assert "recompute_" not in text.partition("backward: ")[0]


def test_the_text_does_not_depend_on_slots_or_runs(compiled: Compiled) -> None:
    """The second model of a process gets other slots, files and addresses."""
    first, second = (stack(compiled, "swap-nvme", layers=2) for _ in range(2))
    slots = [{p.slot for p in halves_of(model).parameters.values()} for model in (first, second)]
    assert not slots[0] & slots[1]
    assert lohan_fx.dump(first) == lohan_fx.dump(second)
    assert lohan_fx.dump(first, format="json") == lohan_fx.dump(second, format="json")


# --- data -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_holds_the_plan_and_all_nodes(six_layers: nn.Module) -> None:
    data = json.loads(lohan_fx.dump(six_layers, format="json"))
    found: Any = six_layers._lohan_fx
    assert Plan.from_json(json.dumps(data["plan"])) == found.plans[-1]
    assert data["captured"] == [{"module": "", "kind": "training", "inputs": ["i64[2, 16]", "f32[8]"]}]
    for name, gm in halves_of(six_layers).graphs():
        graph = data["graphs"][name]
        assert [node["name"] for node in graph["nodes"]] == [node.name for node in gm.graph.nodes]
        covered = 0
        for group in graph["groups"]:
            assert group["start"] == covered
            covered += (group["stop"] - group["start"]) * group["repeats"]
        assert covered == len(graph["nodes"])
        assert any(group["repeats"] > 1 for group in graph["groups"])
    unfolded = json.loads(lohan_fx.dump(six_layers, format="json", unfold=True))
    assert unfolded["graphs"]["forward"]["nodes"] == data["graphs"]["forward"]["nodes"]
    assert all(group["repeats"] == 1 for group in unfolded["graphs"]["forward"]["groups"])


def test_a_plan_alone(compiled: Compiled) -> None:
    model = stack(compiled, "swap-nvme", layers=2)
    found: Any = model._lohan_fx
    plan: Plan = found.plans[-1]
    text = lohan_fx.dump(plan)
    assert text in lohan_fx.dump(model)
    assert "forward:" not in text
    assert json.loads(lohan_fx.dump(plan, format="json")) == {"plan": json.loads(plan.to_json())}


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_it_says_what_the_store_takes_and_its_checkpoints(checkpoints: int, compiled: Compiled) -> None:
    """All parameters are whole pages: nothing is padded."""
    model = compiled(Stack(2), "keep", checkpoints=checkpoints, x=torch.zeros(8, 64, dtype=torch.bfloat16))
    found: Any = model._lohan_fx
    (plan,) = found.plans
    assert found.engine.store.nbytes_allocated == disk_bytes(plan, checkpoints) == (1 + checkpoints) * 14 * 2**18
    more = {0: "; each checkpoint that is kept takes 3.50 MiB more", 2: ", 7.00 MiB more for the last 2 checkpoints"}
    line = f"disk: 3.50 MiB for parameters and states{more[checkpoints]}"
    assert line in lohan_fx.dump(model).splitlines()


# --- which graph ----------------------------------------------------------------------------------------------


def test_all_captured_shapes_are_named_and_the_last_training_one_is_shown(compiled: Compiled) -> None:
    model = stack(compiled, "swap-nvme", layers=2, dynamic=False)
    lohan_fx.prepare(model, x=torch.zeros(4, 64, dtype=torch.bfloat16))
    with torch.no_grad():
        lohan_fx.prepare(model.eval(), x=torch.zeros(8, 64, dtype=torch.bfloat16))
    text = lohan_fx.dump(model)
    captured = text.splitlines()[1:4]
    assert captured[:2] == ["  0: training of bf16[8, 64]", "> 1: training of bf16[4, 64]"]
    assert captured[2].startswith("  2: inference of ")
    assert "backward: " in text and "bf16[4, 1024]" in text and "[8, 1024]" not in text
    inference = lohan_fx.dump(model, graph=2)
    assert "> 2: inference" in inference
    assert "backward: " not in inference
    assert json.loads(lohan_fx.dump(model, graph=0, format="json"))["shown"] == 0
    with pytest.raises(ValueError, match="graph is 3: 3 were captured, expected 0 to 2"):
        lohan_fx.dump(model, graph=3)


def test_a_graph_of_a_part_is_named_and_not_shown_before_the_whole_models(compiled: Compiled) -> None:
    model = stack(compiled, "swap-nvme", layers=2)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    model.layers[1](x)  # type: ignore[index]
    with torch.no_grad():
        model.layers[0](x)  # type: ignore[index]
    first = lohan_fx.dump(model).splitlines()[1:4]
    assert first == [
        "> 0: training of bf16[8, 64]",
        "  1: layers.1 by itself, training of bf16[8, 64]",
        "  2: layers.0 by itself, inference of bf16[8, 64]",
    ]
    data = json.loads(lohan_fx.dump(model, format="json"))
    assert [found["module"] for found in data["captured"]] == ["", "layers.1", "layers.0"] and data["shown"] == 0


@pytest.mark.filterwarnings("ignore:the hardware profile")
def test_where_only_parts_train_one_of_them_is_shown(tmp_path: Path) -> None:
    model = lohan_fx.compile(Stack(2), hw(), nvme=[tmp_path], host_memory="2GiB")
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    with lohan_fx.releasing(model):
        model.layers[1](x)  # type: ignore[index]
        with torch.no_grad():
            model(x)
        assert lohan_fx.dump(model).splitlines()[1] == "> 0: layers.1 by itself, training of bf16[8, 64]"


def test_sizes_that_may_be_smaller_have_names(compiled: Compiled) -> None:
    model = stack(compiled, "swap-nvme", layers=2)
    lohan_fx.prepare(model, x=torch.zeros(12, 64, dtype=torch.bfloat16))
    _, first, second, *_ = lohan_fx.dump(model).splitlines()
    assert first == "  0: training of bf16[8, 64]"
    assert re.fullmatch(r"> 1: training of size (s\d+), bf16\[\1, 64\]", second)


def test_lines_are_cut_at_the_width(compiled: Compiled) -> None:
    model = stack(compiled, "swap-nvme", layers=2)
    whole, cut = (lohan_fx.dump(model, width=width).splitlines() for width in (None, 40))
    assert len(whole) == len(cut)
    assert max(map(len, cut)) == 40
    for long, short in zip(whole, cut, strict=True):
        assert short == long if len(long) <= 40 else short == long[:38] + ".."


# --- refused --------------------------------------------------------------------------------------------------


def test_what_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="not compiled"):
        lohan_fx.dump(Stack(1))
    with pytest.raises(TypeError, match="compiled model or a Plan; got str"):
        lohan_fx.dump("model")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:the hardware profile")
def test_before_the_first_capture_there_is_nothing_to_show(tmp_path: Path) -> None:
    model = lohan_fx.compile(Stack(1), hw(), nvme=[tmp_path], host_memory="2GiB")
    with (
        lohan_fx.releasing(model),
        pytest.raises(ValueError, match=r"nothing has been captured yet: .*prepare\(model"),
    ):
        lohan_fx.dump(model)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="format is 'yaml': expected 'text' or 'json'"):
        lohan_fx.dump(Stack(1), format="yaml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width is 0"):
        lohan_fx.dump(Stack(1), width=0)


# --- words ----------------------------------------------------------------------------------------------------


def test_words() -> None:
    names = [dtype_name(d) for d in (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool)]
    assert names == ["bf16", "f32", "i64", "u8", "bool"]
    assert op_name(torch.ops.aten.add.Tensor) == "aten.add"
    x = torch.empty(2, 3)
    assert type_of(x) == "f32[2, 3]"
    assert type_of((x, None)) == "(f32[2, 3], none)"
    assert type_of(torch.empty(())) == "f32[]"
