"""What ``compile`` and the first call refuse: the message names the thing and the remedy, and nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lohan_fx
from lohan_fx import pipeline
from lohan_fx.capture import prepare_dynamo
from lohan_fx.compile import compiled
from lohan_fx.errors import CaptureError, InfeasiblePlan, OffloadedParameterError, StoreError
from lohan_fx.hardware import HardwareProfile, NvmeProfile
from lohan_fx.plan import Plan
from tests.runtime.faulty_backend import FaultyBackend
from tests.tiny import WIDTH, Plain, Tiny, batch, profile, same_weights

pytestmark = pytest.mark.usefixtures("leak_check")

compile_module = importlib.import_module("lohan_fx.compile")  # the package's name `compile` is the function
store_module = importlib.import_module("lohan_fx.runtime.nvme_store")


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs without a directory go; empty again after every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lohan_fx"


def refused(
    model: nn.Module, kind: type[Exception] | tuple[type[Exception], ...], *words: str, **arguments: Any
) -> str:
    """``compile`` raises ``kind``, saying all of ``words``; the model is untouched, and so are the directories."""
    arguments.setdefault("hw", profile())
    before = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    with pytest.raises(kind) as caught:
        lohan_fx.compile(model, **arguments)
    for word in words:
        assert word in str(caught.value)
    after = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    assert all(after[name][0] is before[name][0] and after[name] == before[name] for name in before)
    given = arguments.get("nvme")
    for directory in [given] if isinstance(given, Path) else []:
        assert not directory.is_dir() or not list(directory.iterdir())
    return str(caught.value)


def streamed(model: nn.Module, nvme: Path, **arguments: Any) -> nn.Module:
    defaults: dict[str, Any] = {"host_memory": "2GiB", "compute_dtype": torch.float32}
    return lohan_fx.compile(model, **{"hw": profile(), "nvme": nvme, **defaults, **arguments})


def train_both(model: nn.Module, plain: nn.Module, call: Callable[[nn.Module], torch.Tensor]) -> None:
    """Two steps of a compiled ``model``, and of ``plain`` by torch's AdamW."""
    for trained, optimizer in (
        (model, lohan_fx.AdamW(model.parameters())),
        (plain, torch.optim.AdamW(plain.parameters())),
    ):
        for _ in range(2):
            call(trained).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# --- directories ----------------------------------------------------------------------------------------------


def test_compile_in_inference_mode(nvme: Path) -> None:
    model = Tiny()
    with torch.inference_mode():
        refused(model, ValueError, "inference_mode", "call it outside", nvme=nvme)


def test_compile_while_a_model_is_built_on_disk(nvme: Path) -> None:
    with lohan_fx.build_on_disk(nvme):
        model = Tiny()
        refused(model, ValueError, "build_on_disk", "call it after that block", nvme=nvme)


def test_a_directory_that_is_not_there(nvme: Path) -> None:
    refused(Tiny(), ValueError, str(nvme / "gone"), "missing", "mkdir -p", nvme=nvme / "gone")
    assert not (nvme / "gone").exists()


def test_a_file_in_place_of_a_directory(nvme: Path) -> None:
    (nvme / "file").write_text("mine")
    refused(Tiny(), ValueError, str(nvme / "file"), "not a directory", nvme=[nvme / "file"])
    assert (nvme / "file").read_text() == "mine"
    (nvme / "file").unlink()


def test_a_directory_of_the_profile_that_is_not_there(nvme: Path) -> None:
    drive = NvmeProfile(str(nvme / "unmounted"), 1e9, 1e9, 1e9, 1 << 40)
    refused(Tiny(), ValueError, "unmounted", "missing", hw=profile(nvme=(drive,)))


@pytest.mark.parametrize("of_the_profile", [False, True])
def test_a_process_may_change_its_directory(of_the_profile: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given relative to the old one stays there: a checkpoint, too, and what is removed at the end."""
    monkeypatch.chdir(nvme.parent)
    if of_the_profile:
        drive = NvmeProfile(nvme.name, 1e9, 1e9, 1e9, 1 << 40)
        model = lohan_fx.compile(Tiny(), profile(nvme=(drive,)), compute_dtype=torch.float32, host_memory="2GiB")
    else:
        model = streamed(Tiny(), Path(nvme.name))
    elsewhere = nvme.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    optimizer = lohan_fx.AdamW(model.parameters())
    model(batch()).backward()
    optimizer.step()
    lohan_fx.checkpoint(model, optimizer)
    lohan_fx.release(model)
    assert (nvme / "lohan_fx.checkpoints").exists()
    assert not list(elsewhere.iterdir())
    shutil.rmtree(nvme)


def test_a_directory_without_permission_to_write(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As root everything is writable, so the answer is made up.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != nvme)
    refused(Tiny(), ValueError, str(nvme), "not writable", "chmod", nvme=nvme)


def test_a_read_only_file_system(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty_store(monkeypatch, FaultyBackend({"open": [30]}))  # EROFS
    refused(Tiny(), StoreError, str(nvme), "Read-only file system", "another directory", nvme=nvme)


def test_the_same_directory_twice(nvme: Path) -> None:
    (nvme.parent / "link").symlink_to(nvme)
    refused(Tiny(), ValueError, str(nvme), "twice", nvme=[nvme, nvme.parent / "link"])
    (nvme.parent / "link").unlink()


def test_a_directory_in_memory_is_warned_of() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        with pytest.warns(UserWarning, match=f"{directory} is in memory .*takes RAM; name one on a drive"):
            model = streamed(Tiny(), Path(directory))
        lohan_fx.release(model)
        assert not os.listdir(directory)


def test_too_little_disk_space(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FaultyBackend(free_bytes={nvme: 8192})
    faulty_store(monkeypatch, backend)
    message = refused(Tiny(), StoreError, str(nvme), "8192 are free", "bytes are needed", "add a directory", nvme=nvme)
    assert "pwritev" not in backend.calls and "fallocate" not in backend.calls
    needed = int(message.split(" bytes are needed")[0].split()[-1])
    assert needed > 12 * sum(p.numel() for p in Tiny().parameters())


def test_the_disk_fills_up_while_parameters_are_written(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty_store(monkeypatch, FaultyBackend({"pwritev": [None, None, 28]}))
    refused(Tiny(), StoreError, str(nvme), "No space left", ":master", nvme=nvme)


def test_a_failure_after_everything_is_written(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room for shells")

    monkeypatch.setattr(importlib.import_module("lohan_fx.compiled_model"), "make_shell", fails)
    model = Tiny()
    plain = Plain(model)
    refused(model, MemoryError, nvme=nvme)
    assert model(batch()).item() == plain.model(batch()).item()


def test_the_default_directory_is_removed_when_compile_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty_store(monkeypatch, FaultyBackend({"fallocate": [5]}))
    refused(Tiny(), StoreError, "Input/output error")
    assert not list(cache.iterdir())
    monkeypatch.undo()


def test_the_default_directory_is_removed_with_what_killed_runs_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the same process id as this one's, as in a container that is started again."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (f"run-{ended.pid}-0", f"run-{os.getpid()}-0"):
        (cache / name).mkdir(parents=True)
        (cache / name / "lohan_fx.store").write_text("gigabytes")
    model = lohan_fx.compile(Tiny(), profile(), host_memory="2GiB")
    (made,) = cache.iterdir()
    assert made.name.startswith(f"run-{os.getpid()}-") and made.name != f"run-{os.getpid()}-0"
    lohan_fx.release(model)
    assert not list(cache.iterdir())


def test_what_a_run_that_cannot_be_seen_uses_is_left_alone(cache: Path) -> None:
    """One in another container, or on another host: its process id means nothing here."""
    model = lohan_fx.compile(Tiny(), profile(), host_memory="2GiB")
    (made,) = cache.iterdir()
    theirs = made.rename(cache / "run-999999999-theirs")
    lohan_fx.release(lohan_fx.compile(Tiny(), profile(), host_memory="2GiB"))
    assert [path.name for path in cache.iterdir()] == [theirs.name]
    theirs.rename(made)
    lohan_fx.release(model)
    assert not list(cache.iterdir())


def faulty_store(monkeypatch: pytest.MonkeyPatch, backend: FaultyBackend) -> None:
    def store(directories: Any, **arguments: Any) -> Any:
        return store_module.NvmeStore(directories, **arguments, backend=backend)

    monkeypatch.setattr(compile_module, "NvmeStore", store)


# --- two runs -------------------------------------------------------------------------------------------------


def test_two_models_in_one_directory(nvme: Path) -> None:
    first = streamed(Tiny(), nvme)
    with pytest.raises(StoreError, match=rf"{nvme} is used by .*this very process, process {os.getpid()}, .*reset\(\)"):
        lohan_fx.compile(second := Tiny(), profile(), nvme=nvme)
    assert type(second.layers[0].weight) is nn.Parameter
    assert torch.isfinite(first(batch()))  # the first one's files are still there
    lohan_fx.release(first)
    lohan_fx.release(streamed(second, nvme))


def test_reset_ends_what_no_variable_leads_to(nvme: Path) -> None:
    """A notebook's cell that ran twice."""
    assert torch.isfinite(streamed(Tiny(), nvme)(batch()))
    kept = Tiny()
    with pytest.raises(StoreError, match="this very process"):
        lohan_fx.compile(kept, profile(), nvme=nvme)
    lohan_fx.reset()
    assert not list(Path(nvme).iterdir())
    lohan_fx.reset()  # nothing to end
    ended = streamed(Tiny(), nvme)
    lohan_fx.reset()
    with pytest.raises(ValueError, match=r"this Tiny was ended by lohan_fx.reset\(\) .*build"):
        lohan_fx.release(ended)
    with pytest.raises(ValueError, match=r"ended by lohan_fx.reset\(\) .*build it again"):
        streamed(ended, nvme)
    with pytest.raises(OffloadedParameterError, match=r"must be built again"):
        ended(batch())
    model = streamed(kept, nvme)
    assert torch.isfinite(model(batch()))
    lohan_fx.release(model)


def test_reset_of_one_model_leaves_the_others(nvme: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    ended, other = streamed(Tiny(), nvme), streamed(Tiny(), tmp_path / "other")
    lohan_fx.reset(ended)
    assert torch.isfinite(other(batch()))
    with pytest.raises(ValueError, match="was ended by"):
        lohan_fx.reset(other, ended)  # none of them, then
    lohan_fx.release(other)


def test_more_memory_is_promised_than_there_is(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HardwareProfile, "is_this_machine", lambda self: True)
    hw = profile()
    with pytest.warns(
        UserWarning, match=r"host_memory promises 9e\+05 GiB, and this machine has .* promise what is free"
    ):
        lohan_fx.release(lohan_fx.compile(Tiny(), hw, nvme=nvme, host_memory="900000GiB"))


def test_two_processes_in_one_directory(nvme: Path) -> None:
    model = streamed(Tiny(), nvme)
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tests.end_to_end.test_bad_compile import second; second(sys.argv[1])",
            nvme,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert f"{nvme} is used by another lohan_fx run, process {os.getpid()}" in child.stdout
    assert "wait for that process or end it" in child.stdout
    assert torch.isfinite(model(batch()))
    lohan_fx.release(model)


def second(nvme: str) -> None:
    """Run by another process."""
    try:
        lohan_fx.compile(Tiny(), profile(), nvme=nvme)
    except StoreError as error:
        print(error)


def test_a_process_that_ends_without_release_removes_its_files(nvme: Path) -> None:
    code = """
        import os, sys
        from tests.tiny import Tiny, profile
        import lohan_fx
        model = lohan_fx.compile(Tiny(), profile(), nvme=sys.argv[1], host_memory="2GiB")
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print(sorted(os.listdir(sys.argv[1])))
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), nvme], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "['lohan_fx.lock', 'lohan_fx.store']"  # the forked child's end did not remove them
    assert not list(nvme.iterdir())


# --- memory ---------------------------------------------------------------------------------------------------


def test_host_memory_too_small_for_anything(nvme: Path) -> None:
    message = refused(
        Tiny(), InfeasiblePlan, "host_memory=1,048,576", "bytes are missing", "at least", nvme=nvme, host_memory="1MiB"
    )
    enough = int(message.rpartition("at least ")[2].replace(",", ""))
    lohan_fx.release(streamed(Tiny(), nvme, host_memory=enough))


def test_device_memory_too_small_for_the_largest_parameter(nvme: Path) -> None:
    refused(Tiny(), InfeasiblePlan, "layers.0.weight", "bytes short", nvme=nvme, host_memory="2GiB", device_memory=600)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops on values of a gigabyte are not tried one by one."""
    monkeypatch.setattr(pipeline, "time_ops", lambda gm, device: None)


@pytest.mark.usefixtures("untimed")
def test_memory_too_small_for_the_graphs(nvme: Path) -> None:
    plain = Plain(Tiny())
    model = streamed(Tiny(), nvme, host_memory="400MiB")
    model.load_state_dict(plain.model.state_dict())
    optimizer = lohan_fx.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(
        InfeasiblePlan, match=r"host_memory=\S+ bytes is \S+ short; host_memory=\S+ would fit.*smaller batch"
    ):
        model(torch.zeros(1, WIDTH).expand(4 << 20, WIDTH))
    optimizer.zero_grad()
    loss = model(batch())  # one that fits
    loss.backward()
    optimizer.step()
    assert [loss.item()] == plain.step(batch())
    lohan_fx.release(model)
    same_weights(model, plain.model)
    assert not list(nvme.iterdir())


@pytest.mark.usefixtures("untimed")
def test_what_infeasible_plan_says_would_fit_does(nvme: Path) -> None:
    x = torch.zeros(1, WIDTH).expand(2 << 20, WIDTH)
    model = streamed(Tiny(), nvme, host_memory="400MiB", policy="keep")
    with pytest.raises(InfeasiblePlan) as caught:
        lohan_fx.prepare(model, x)
    lohan_fx.release(model)
    (enough,) = re.findall("host_memory=([0-9,]+) would fit", str(caught.value))
    model = streamed(model, nvme, host_memory=int(enough.replace(",", "")), policy="keep")
    assert lohan_fx.prepare(model, x).host_memory_bytes == int(enough.replace(",", ""))
    lohan_fx.release(model)


# --- models ---------------------------------------------------------------------------------------------------


class Odd(Tiny):
    """Does ``what`` in the middle of its forward."""

    def __init__(self, what: Callable[[Odd, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.what = what
        self.embedding = nn.Embedding(4, WIDTH, sparse=True)
        self.kept = [self.layers[1].weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.what(self, self.layers[0](x))
        return super().forward(x)


def breaks(model: Odd, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


def branches(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x


def counts(model: Odd, x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.abs().max())):
        x = x + 1
    return x


def chooses(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x * (1.0, 2.0)[int(torch.rand(1).item() * 2)]


def looks_at_the_clock(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x * time.perf_counter()


def refuses(model: Odd, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("specify either x or y")


def breaks_in_a_checkpoint(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(functools.partial(breaks, model), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (breaks, "graph_break()"),
        (branches, "Data-dependent branching"),
        (counts, "data-dependent expression"),
        (chooses, "data-dependent expression"),
        (looks_at_the_clock, "perf_counter"),
        (refuses, "specify either x or y"),
    ],
)
def test_a_graph_break_says_where_and_why(what: Callable[..., torch.Tensor], reason: str, nvme: Path) -> None:
    model = streamed(Odd(what), nvme)
    with pytest.raises(CaptureError) as caught:
        model(batch())
    assert reason in str(caught.value)
    line = what.__code__.co_firstlineno
    places = [f'{Path(__file__).name}", line {line + n}, in {what.__name__}' for n in (1, 2)]
    assert any(place in str(caught.value) for place in places)
    assert "torch._dynamo.explain" in str(caught.value)
    lohan_fx.release(model)
    assert not list(nvme.iterdir())


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(4, 4), (2, 4)), (nn.Conv1d(4, 4, 1, bias=False), (2, 4, 4))])
def test_inputs_in_another_dtype_than_the_parameters(layer: nn.Module, shape: tuple[int, ...], nvme: Path) -> None:
    model = lohan_fx.compile(layer, profile(), nvme=nvme, host_memory="1GiB", compute_dtype=torch.bfloat16)
    with (
        lohan_fx.releasing(model),
        pytest.raises(CaptureError, match=r"inputs in that dtype.*compute_dtype=torch\.float32"),
    ):
        model(torch.ones(shape))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_says_how_it_is_traced(kind: type[nn.RNNBase], nvme: Path) -> None:
    torch.manual_seed(0)
    with lohan_fx.releasing(streamed(kind(WIDTH, WIDTH), nvme)) as model:
        expected = kind(WIDTH, WIDTH)
        expected.load_state_dict(model.state_dict())
        with pytest.raises(CaptureError, match=r"allow_rnn = True.*torch\.backends\.mkldnn\.set_flags\(False\)"):
            model(batch())
        with torch._dynamo.config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=False):
            train_both(model, expected, lambda trained: trained(batch())[0])
    same_weights(model, expected)


def test_dora_says_how_it_is_traced(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's adapters look at ``weight.__class__``."""

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False)
        model: nn.Module = peft.get_peft_model(nn.Sequential(nn.Linear(WIDTH, WIDTH)), config)
        return model

    expected = adapted()
    with lohan_fx.releasing(streamed(adapted(), nvme)) as model:
        with pytest.raises(CaptureError, match=r"dora\.dequantize_module_weight = lambda module: module\.weight"):
            model(batch())
        monkeypatch.setattr("peft.tuners.lora.dora.dequantize_module_weight", lambda module: module.weight)
        train_both(model, expected, lambda trained: trained(batch()))
    same_weights(model, expected)


def test_a_graph_break_inside_a_checkpoint_says_that_none_is_needed(nvme: Path) -> None:
    model = streamed(Odd(breaks_in_a_checkpoint), nvme)
    with pytest.raises(CaptureError, match="gradient_checkpointing_disable"):
        model(batch())
    lohan_fx.release(model)


def edits_itself(model: Odd, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.layers[1].weight.mul_(0.5)
    return x


def looks_up(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x + model.embedding(torch.zeros(1, dtype=torch.int64))


def reads_another_reference(model: Odd, x: torch.Tensor) -> torch.Tensor:
    (weight,) = model.kept
    return x @ weight


def selects(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x + x[x > 0].sum()


def test_statistics_of_another_dtype_than_their_parameters(nvme: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    half = torch.bfloat16
    refused(build(), ValueError, "1 is a BatchNorm1d", "float32", "to(torch.bfloat16)", compute_dtype=half, nvme=nvme)
    for model, dtype in ((build(), torch.float32), (build().to(half), half)):
        expected = copy.deepcopy(model)
        with lohan_fx.releasing(streamed(model, nvme, compute_dtype=dtype)):
            assert torch.equal(model(batch().to(dtype)), expected(batch().to(dtype)))
            assert torch.equal(model[1].running_mean, expected[1].running_mean)


def the_same_data() -> nn.Module:
    model = Tiny()
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.data)
    return model


def a_transposed_view() -> nn.Module:
    model = Tiny()
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.data.t())
    return model


def a_part() -> nn.Module:
    model = Tiny()
    model.layers[1].bias = nn.Parameter(model.layers[0].weight.data[1])
    return model


@pytest.mark.parametrize("build", [the_same_data, a_transposed_view, a_part])
def test_parameters_over_the_same_memory(build: Callable[[], nn.Module], nvme: Path) -> None:
    refused(build(), ValueError, "layers.0.weight", "layers.1.", "share memory", nvme=nvme)


def a_row(model: nn.Module) -> torch.Tensor:
    return model.layers[0].weight.data[0]


def a_column(model: nn.Module) -> torch.Tensor:
    return model.layers[0].weight.data[:, 1]


def a_larger_one(model: nn.Module) -> torch.Tensor:
    weight, flat = model.layers[0].weight, torch.zeros(4 * WIDTH * WIDTH)
    weight.data = flat[WIDTH * WIDTH : 2 * WIDTH * WIDTH].view_as(weight)
    return flat


@pytest.mark.parametrize("make", [a_row, a_column, a_larger_one])
def test_a_buffer_over_the_memory_of_a_parameter(make: Callable[[nn.Module], torch.Tensor], nvme: Path) -> None:
    model = Tiny()
    buffer = make(model)
    model.register_buffer("seen", buffer)
    model.register_buffer("before", buffer[:0])
    refused(model, ValueError, "parameter layers.0.weight", "buffer seen", "share memory", nvme=nvme)


def test_a_parameter_behind_another_within_a_buffer(nvme: Path) -> None:
    """The overlap is not between neighbours."""
    model = Tiny()
    flat, area = torch.zeros(4 * WIDTH * WIDTH), WIDTH * WIDTH
    model.layers[1].weight.data = flat[2 * area : 3 * area].view(WIDTH, WIDTH)
    model.register_buffer("all", flat)
    model.register_buffer("first", flat[:2])
    refused(model, ValueError, "buffer all and parameter layers.1.weight share memory", nvme=nvme)


def test_buffers_may_share_memory(nvme: Path) -> None:
    model = Tiny()
    model.register_buffer("all", torch.zeros(WIDTH))
    model.register_buffer("part", model.all[1:3])
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    lohan_fx.release(streamed(model, nvme))


@pytest.mark.filterwarnings("ignore:not contiguous")
def test_parameters_that_lie_beside_one_another_in_one_storage(nvme: Path) -> None:
    model = Tiny()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data = part.view(parameter.shape)
    columns = torch.randn(WIDTH, 2 * WIDTH)
    model.layers[0].weight.data, model.layers[1].weight.data = columns.split(WIDTH, dim=1)
    expected = Plain(model).model(batch()).item()
    with lohan_fx.releasing(streamed(model, nvme)), torch.no_grad():
        assert model(batch()).item() == expected


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (edits_itself, "edits its parameter layers.1.weight in place"),
        (reads_another_reference, "reads layers.1.weight from somewhere else than its registered place"),
        (looks_up, "gradient of embedding.weight is torch.sparse_coo.*sparse=False"),
        (selects, "depends on values and not on input shapes.*torch.where"),
    ],
)
def test_a_graph_that_cannot_be_streamed(what: Callable[..., torch.Tensor], reason: str, nvme: Path) -> None:
    model = streamed(Odd(what), nvme)
    with pytest.raises(CaptureError, match=reason):
        model(batch())
    lohan_fx.release(model)


def test_training_with_nested_tensors(nvme: Path) -> None:
    nested = torch.nested.nested_tensor([batch(rows=2), batch(rows=3)], layout=torch.jagged)
    model = streamed(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nvme)
    with pytest.raises(CaptureError, match=r"a nested tensor.*to_padded_tensor"):
        model(nested)
    lohan_fx.release(model)


def test_parameters_edited_without_gradients(nvme: Path) -> None:
    model = streamed(Odd(edits_itself), nvme)
    with torch.no_grad(), pytest.raises(CaptureError, match=r"edits its parameter layers.1.weight in place"):
        model(batch())
    lohan_fx.release(model)


class Returning(Tiny):
    """Returns what ``of`` makes of a parameter, beside the loss."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), self.of(self.layers[1].weight)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("of", [torch.t, torch.detach, lambda weight: weight.chunk(2)[1]], ids=["t", "detach", "part"])
def test_a_view_of_a_parameter_is_not_returned(
    of: Callable[[torch.Tensor], torch.Tensor], trained: bool, nvme: Path
) -> None:
    model = streamed(Returning(of), nvme)
    with (
        torch.set_grad_enabled(trained),
        pytest.raises(CaptureError, match=r"view of its parameter layers.1.weight.*clone"),
    ):
        model(batch())
    lohan_fx.release(model)


@pytest.mark.parametrize("of", [lambda weight: weight.t().clone(), lambda weight: weight])
def test_a_parameter_or_a_copy_is_returned(of: Callable[[torch.Tensor], torch.Tensor], nvme: Path) -> None:
    model = Returning(of)
    expected = of(model.layers[1].weight).detach().clone()
    with lohan_fx.releasing(streamed(model, nvme)):
        _, returned = model(batch())
        assert returned is model.layers[1].weight or torch.equal(returned, expected)


def test_more_shapes_than_plans_are_made_for(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.compiled_model.RECOMPILE_LIMIT", 2)
    with lohan_fx.releasing(streamed(Tiny(), nvme, dynamic=False)) as model:
        optimizer = lohan_fx.AdamW(model.parameters())
        for rows in (3, 4, 5):
            trained = nullcontext() if rows < 5 else pytest.raises(CaptureError, match=r"for 2 kinds of inputs.*pad")
            with trained:
                model(batch(rows=rows)).sum().backward()
                optimizer.step()
        model(batch(rows=4)).sum().backward()  # those that it has go on
        optimizer.step()
        assert len(compiled(model).plans) == 2


def test_more_python_numbers_than_plans_are_made_for(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.compiled_model.RECOMPILE_LIMIT", 3)
    reason = r"A Python number.*as tensors, torch\.tensor"

    class Scaled(Tiny):
        def forward(self, x: torch.Tensor, beta: Any) -> torch.Tensor:
            return super().forward(x) * beta

    with lohan_fx.releasing(streamed(Scaled(), nvme, dynamic=False)) as model:
        optimizer = lohan_fx.AdamW(model.parameters())
        for beta in (0.5, 1.5, torch.tensor(2.5), torch.tensor(3.5), 4.5):
            with pytest.raises(CaptureError, match=reason) if beta == 4.5 else nullcontext():
                model(batch(), beta).backward()
                optimizer.step()


def test_inputs_of_a_wrong_shape(nvme: Path) -> None:
    plain = Plain(Tiny())
    model = streamed(Tiny(), nvme)
    model.load_state_dict(plain.model.state_dict())
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        model(torch.zeros(2, WIDTH + 1))
    assert model(batch()).item() == plain.model(batch()).item()
    lohan_fx.release(model)


def meta_model() -> nn.Module:
    """Nothing in it says how its parameter is set."""
    with torch.device("meta"):
        model = Tiny()
        model.scale = nn.Parameter(torch.ones(3))
    return model


def partly_on_meta() -> nn.Module:
    model = Tiny()
    model.layers[2].bias = nn.Parameter(torch.empty(WIDTH, device="meta"))
    return model


def with_a_gradient() -> nn.Module:
    model = Tiny()
    model(batch()).backward()
    return model


def with_a_hook() -> nn.Module:
    model = Tiny()
    model.layers[1].bias.register_hook(lambda gradient: gradient * 2)
    return model


def with_a_late_hook() -> nn.Module:
    model = Tiny()
    model.layers[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def with_a_sparse_parameter() -> nn.Module:
    model = Tiny()
    model.register_parameter("thin", nn.Parameter(torch.eye(3).to_sparse()))
    return model


def compiled_by_torch() -> nn.Module:
    model = Tiny()
    model.compile()
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (meta_model, ("scale (of a Tiny)", "meta", "build_on_disk", "initialize=", "weights=")),
        (partly_on_meta, ("a Linear is on the meta device in part", "build_on_disk")),
        (lambda: Tiny().double(), ("layers.0.weight", "torch.float64", "make it", "float32")),
        (lambda: Tiny().to(torch.complex64), ("layers.0.weight", "torch.complex64")),
        (nn.ReLU, ("ReLU", "no parameters")),
        (lambda: nn.LazyLinear(3), ("weight", "lazy", "call the model once")),
        (with_a_gradient, ("layers.0.weight", "gradient", "zero_grad")),
        (with_a_hook, ("layers.1.bias", "hook", "remove the hook")),
        (with_a_late_hook, ("layers.1.bias", "hook", "remove the hook")),
        (with_a_sparse_parameter, ("thin", "torch.sparse_coo", "dense")),
        (compiled_by_torch, ("torch.compile",)),
        (lambda: torch.compile(Tiny()), ("torch.compile",)),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_a_model_that_cannot_be_compiled(make: Callable[[], nn.Module], words: tuple[str, ...], nvme: Path) -> None:
    refused(make(), ValueError, *words, nvme=nvme)


def test_a_model_that_is_compiled_already(nvme: Path, tmp_path: Path) -> None:
    model = streamed(Tiny(), nvme)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    refused(model, ValueError, "compiled already", "lohan_fx.release", nvme=elsewhere)
    refused(model.layers[1], ValueError, "weight", "part of is compiled already", "release", nvme=elsewhere)
    refused(nn.Sequential(model, nn.Linear(3, 3)), ValueError, "compiled already", "release", nvme=elsewhere)
    lohan_fx.release(model)
    lohan_fx.release(streamed(model, nvme))


def test_releasing_what_is_not_compiled(nvme: Path) -> None:
    with pytest.raises(ValueError, match=r"this Tiny is not compiled: call lohan_fx.compile"):
        lohan_fx.release(Tiny())
    model = streamed(Tiny(), nvme)
    assert lohan_fx.release(model) is model
    for again in (lohan_fx.release, lambda m: lohan_fx.prepare(m, batch())):
        with pytest.raises(ValueError, match="this Tiny is not compiled"):
            again(model)


# --- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"hw": "hw.toml"}, TypeError, ("hw is a str", "HardwareProfile.measure")),
        ({"hw": None}, TypeError, ("hw is a NoneType",)),
        ({"host_memory": "6 elephants"}, ValueError, ("host_memory", "6 elephants", "6GiB")),
        ({"host_memory": 0}, ValueError, ("host_memory", "at least one byte")),
        ({"host_memory": -5}, ValueError, ("host_memory", "at least one byte")),
        ({"host_memory": float("nan")}, ValueError, ("host_memory", "at least one byte")),
        ({"host_memory": True}, TypeError, ("host_memory is True",)),
        ({"host_memory": [1]}, TypeError, ("host_memory is [1]",)),
        ({"device_memory": "1 GHz"}, ValueError, ("device_memory", "1 GHz")),
        ({"device_memory": {}}, TypeError, ("device_memory is {}",)),
        ({"nvme": 5}, TypeError, ("nvme is 5", "list with a directory per drive")),
        ({"nvme": [5]}, TypeError, ("nvme is [5]",)),
        ({"nvme": []}, ValueError, ("nvme is an empty list",)),
        ({"nvme": ""}, ValueError, ("nvme is an empty text", "'.'")),
        ({"nvme": [""]}, ValueError, ("nvme is an empty text",)),
        ({"compute_dtype": torch.float64}, ValueError, ("torch.float64", "torch.bfloat16")),
        ({"compute_dtype": "bfloat16"}, ValueError, ("compute_dtype is bfloat16", "torch.bfloat16")),
        ({"policy": "clever"}, ValueError, ("unknown policy 'clever'", "lohan", "recompute")),
        ({"policy": None}, ValueError, ("unknown policy None",)),
        ({"plan": "plan.json"}, TypeError, ("plan is a str", "Plan.from_json")),
        ({"revise": "no"}, TypeError, ("revise is 'no'", "True or False")),
        ({"hold_gradients": "no"}, TypeError, ("hold_gradients is 'no'", "True, False or None")),
    ],
)
def test_an_argument_that_is_no_good(
    arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...], cache: Path
) -> None:
    refused(Tiny(), kind, *words, **arguments)
    assert not cache.exists()


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module; got function"):
        lohan_fx.compile(meta_model, profile())
    model = Tiny()
    with pytest.raises(TypeError, match=r"expected a model that lohan_fx\.compile has streamed; got SGD"):
        lohan_fx.checkpoint(torch.optim.SGD(model.parameters()), model)  # type: ignore[arg-type]


def test_a_profile_of_another_machine_is_warned_of(nvme: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"'theirs' was not measured on this machine.*HardwareProfile\.measure"
    ) as warned:
        model = streamed(Tiny(), nvme, hw=profile(name="theirs", machine="another one"))
    assert warned[0].filename.endswith("test_bad_compile.py")
    lohan_fx.release(model)


def test_a_profile_that_was_measured_otherwise_is_warned_of(nvme: Path) -> None:
    earlier = profile(name="of last year", measured_at="2025-11-25T20:10:38+00:00", versions={"torch": "2.11.0"})
    with pytest.warns(
        UserWarning, match=r"'of last year'.*another version of lohan_fx.*HardwareProfile\.measure"
    ) as warned:
        model = streamed(Tiny(), nvme, hw=earlier)
    assert [warning.filename for warning in warned] == [__file__]
    lohan_fx.release(model)


def test_a_parameter_that_is_not_contiguous_is_warned_of(nvme: Path) -> None:
    model = Tiny()
    for layer in model.layers[1:]:
        layer.weight = nn.Parameter(layer.weight.detach().t())
    with pytest.warns(UserWarning, match=r"contiguous from here on: layers\.1\.weight and 1 more\.") as warned:
        streamed(model, nvme)
    assert [warning.filename for warning in warned] == [__file__]
    lohan_fx.release(model)
    assert all(layer.weight.is_contiguous() for layer in model.layers)


def test_a_dtype_without_kernels_is_warned_of(nvme: Path) -> None:
    slow = profile(matmul_flops_per_s={"float32": 1.2e11, "bfloat16": 1.3e9})
    with pytest.warns(UserWarning, match=r"bfloat16 run at 1\.3 GFLOP/s on .*compute_dtype=torch\.float32") as warned:
        model = streamed(Tiny(), nvme, hw=slow, compute_dtype=torch.bfloat16)
    assert [warning.filename for warning in warned] == [__file__]
    lohan_fx.release(model)


def test_a_profile_of_a_gpu_where_there_is_none(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(Tiny(), ValueError, "rtx4090", "CUDA", hw=HardwareProfile.preset("rtx4090-12xP5510"), nvme=nvme)


def test_a_profile_without_the_rate_for_a_dtype(nvme: Path) -> None:
    hw = profile(matmul_flops_per_s={"float32": 1e11})
    refused(Tiny(), ValueError, "torch.bfloat16", "torch.float32", hw=hw, nvme=nvme)


def plan_of(model: nn.Module, nvme: Path, **arguments: Any) -> Plan:
    streamed(model, nvme, **arguments)
    plan = lohan_fx.prepare(model, batch())
    lohan_fx.release(model)
    return plan


def test_a_plan_for_another_dtype(nvme: Path) -> None:
    plan = plan_of(Tiny(), nvme)
    refused(Tiny(), ValueError, "the plan is for float32", "torch.bfloat16", nvme=nvme, plan=plan)


def test_a_policy_that_did_not_make_the_plan(nvme: Path) -> None:
    plan = plan_of(Tiny(), nvme, policy="keep")
    words = ("policy is 'fuyou'", "'keep' made the plan", "leave one of them out")
    refused(Tiny(), ValueError, *words, nvme=nvme, plan=plan, policy="fuyou", compute_dtype=torch.float32)
    for policy in ("keep", "lohan"):
        model = streamed(Tiny(), nvme, plan=plan, policy=policy)
        assert lohan_fx.prepare(model, batch()).policy == "keep"
        lohan_fx.release(model)


def test_a_plan_of_another_model(nvme: Path) -> None:
    plan = plan_of(nn.Sequential(Tiny().layers[0], nn.GELU(), nn.Linear(WIDTH, 1)), nvme, policy="keep")
    assert plan.activations
    plan = dataclasses.replace(
        plan, activations=tuple(dataclasses.replace(a, node="gelu_of_mine") for a in plan.activations)
    )
    model = streamed(Tiny(), nvme, plan=plan)
    with pytest.raises(
        ValueError, match="activation gelu_of_mine, which this graph lacks: the plan is of another model"
    ):
        model(batch())
    lohan_fx.release(model)
    assert not list(nvme.iterdir())


def test_dynamo_ignores_the_warnings_of_hugging_face_once() -> None:
    prepare_dynamo()
    before = set(torch._dynamo.config.ignore_logging_functions)
    prepare_dynamo()
    assert set(torch._dynamo.config.ignore_logging_functions) == before
