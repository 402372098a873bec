"""Models built on meta: the numbers are those of plain construction, and nothing else of the model changes."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx import process_memory
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.optim import AdamW
from lohan_fx.parameters.meta_init import initialized
from tests.end_to_end.models import GPT2, LLAMA, OPT, PERCEPTRON, VIT, Case
from tests.end_to_end.recipes import LR, train
from tests.tiny import Tiny, batch, profile, same_weights

pytestmark = [
    pytest.mark.usefixtures("leak_check"),
    pytest.mark.filterwarnings("ignore:the hardware profile"),
]


class WithAttention(nn.Module):
    """Its constructor draws after its children's, and sets one of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)


class NanoGpt(nn.Module):
    """A model of its own kind of ``_init_weights``, which leaves norms to their constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 20)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class Shared(nn.Module):
    """It is tied once all is drawn, and a call on the whole of it sets what is shared (T5)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(20, 16)
        self.encoder = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.apply(self._init_weights)
        self.encoder.weight = self.head.weight = self.shared.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Shared):
            nn.init.normal_(module.shared.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def _on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def _values(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """What ``initialized`` makes of a model on meta, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    buffers = initialized(
        model, options.pop("initialize", None), lambda p, v: found.update({names[id(p)]: v}), **options
    )
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    return {**found, **{prefixes[module] + name: value for (module, name), value in buffers.items()}}


@pytest.mark.parametrize("make", [LLAMA.make, OPT.make, PERCEPTRON.make, Tiny, NanoGpt, WithAttention, Shared])
def test_the_numbers_and_the_generator_are_those_of_plain_construction(make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    plain = make()
    drawn = torch.rand(4)
    model = _on_meta(make)
    torch.manual_seed(3)
    found = _values(model)
    assert torch.equal(torch.rand(4), drawn)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("case", [GPT2, VIT], ids=str)
def test_constructors_that_draw_themselves_give_another_sample(case: Case) -> None:
    """Documented: GPT-2's Conv1D and ViT's tokens draw in ``__init__``, which is not executed again."""
    plain = case.build()
    found = _values(_on_meta(case.make))
    for name, value in plain.named_parameters():
        assert found[name].shape == value.shape
        assert abs(found[name].std() - value.detach().std()) < 0.01, name


def test_one_module_is_in_memory_at_a_time() -> None:
    model = _on_meta(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    alive: list[int] = []

    def store(parameter: nn.Parameter, value: torch.Tensor) -> None:
        alive.append(sum(not p.is_meta for p in model.parameters()))

    initialized(model, None, store)
    assert alive == [2] * 8


def test_what_is_tied_is_in_memory_once() -> None:
    model = _on_meta(Shared)
    assert _values(model, most_bytes=model.shared.weight.nbytes).keys() == {"shared.weight"}


class Watched(nn.Linear):
    """Sees which values that were stored are still there when it is initialised."""

    stored: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def reset_parameters(self) -> None:
        assert all(value() is None for value in self.stored)
        super().reset_parameters()


def test_a_module_s_values_are_gone_before_the_next_ones_are_made() -> None:
    model = _on_meta(lambda: nn.Sequential(*(Watched(8, 8) for _ in range(3))))
    Watched.stored.clear()
    initialized(model, None, lambda parameter, value: Watched.stored.append(weakref.ref(value)))
    assert len(Watched.stored) == 6


class Drawn(nn.Linear):
    """Tells of being initialised on the CPU."""

    events: ClassVar[list[str]] = []

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.events.append("drawn")
        super().reset_parameters()


class Redrawn(nn.Sequential):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


def test_what_earlier_draws_have_freed_goes_back_where_nothing_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a constructor draws is not stored where ``_init_weights`` draws it anew."""
    Drawn.events.clear()
    monkeypatch.setattr(process_memory, "return_free_memory", lambda: Drawn.events.append("returned"))
    initialized(_on_meta(lambda: Redrawn(*(Drawn(8, 8) for _ in range(2)))), None, lambda parameter, value: None)
    assert Drawn.events == ["returned", "drawn"] * 4


def test_a_module_larger_than_the_memory_for_it_is_refused_before_anything_is_made() -> None:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(64, 64)))
    stored: list[nn.Parameter] = []
    needed = 4 * (64 * 64 + 64)
    with pytest.raises(
        InfeasiblePlan, match=rf"initialising 1 \(a Linear\).*takes {needed:,} bytes.*leaves {needed - 1:,}"
    ):
        initialized(model, None, lambda parameter, value: stored.append(parameter), most_bytes=needed - 1)
    assert not stored
    initialized(model, None, lambda parameter, value: stored.append(parameter), most_bytes=needed)
    assert len(stored) == 4


def test_what_host_memory_leaves_for_initialisation_is_told(tmp_path: Path) -> None:
    """A GPU holds the parameter, and the RAM that is promised does not."""
    model = _on_meta(lambda: nn.Sequential(nn.Embedding(1 << 20, 64), nn.Linear(64, 1)))
    hw = profile(device_memory_bytes=2 << 30)
    with pytest.raises(InfeasiblePlan, match=r"initialising 0 \(a Embedding\).*takes 268,435,456 bytes"):
        lohan_fx.compile(model, hw, nvme=tmp_path, host_memory="250MiB", device_memory="1GiB")
    assert not list(tmp_path.iterdir())


def test_ones_own_initialisation() -> None:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    seen: list[nn.Module] = []

    def initialize(module: nn.Module) -> None:
        seen.append(module)
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            t.fill_(len(seen))

    found = _values(model, initialize=initialize)
    assert seen == [model[0], model[1]]
    assert {name: value.flatten()[0].item() for name, value in found.items()} == {
        "0.weight": 1, "0.bias": 1, "1.weight": 2, "1.bias": 2,
        "1.running_mean": 2, "1.running_var": 2, "1.num_batches_tracked": 2,
    }  # fmt: skip


def test_numbers_that_nobody_sets_are_refused() -> None:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(ValueError, match=r"0\.bias .*leaves 4 of its 4 numbers unset"):
        _values(model, initialize=lambda module: nn.init.ones_(module.weight))


class Masked(nn.Module):
    """``reset_parameters`` leaves the buffer to the constructor, or sets it as ``way`` does."""

    def __init__(self, mask: torch.Tensor, way: Callable[[torch.Tensor], object] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", mask, persistent=False)
        self.way = way
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.way is not None:
            self.way(self.mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_that_nobody_sets_is_refused(dtype: torch.dtype) -> None:
    model = _on_meta(lambda: nn.Sequential(Masked(torch.ones(8, 8).triu(1).to(dtype))))
    with pytest.raises(ValueError, match=r"0\.mask .*leaves 64 of its 64 numbers unset"):
        _values(model)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("way", [torch.Tensor.zero_, lambda mask: mask.data.fill_(1)])
def test_a_mask_that_is_set(dtype: torch.dtype, way: Callable[[torch.Tensor], object]) -> None:
    expected = dict(Masked(torch.ones(8, dtype=dtype), way).named_buffers())
    found = _values(_on_meta(lambda: Masked(torch.ones(8, dtype=dtype), way)))
    assert torch.equal(found["mask"], expected["mask"])


def test_a_mask_without_elements() -> None:
    assert _values(_on_meta(lambda: Masked(torch.ones(0, dtype=torch.bool))))["mask"].numel() == 0


def test_a_mask_that_comes_from_elsewhere_is_not_looked_at() -> None:
    model = _on_meta(lambda: Masked(torch.ones(8, dtype=torch.bool)))
    model.register_buffer("other", torch.empty(2, device="meta"))
    model.way = lambda _: model.other.zero_()
    assert _values(model, parameters=False, skip=frozenset(["mask"])).keys() == {"other"}


@pytest.mark.parametrize("case", [LLAMA, PERCEPTRON], ids=str)
def test_a_model_from_meta_trains_as_one_from_the_cpu(case: Case, tmp_path: Path) -> None:
    """Tied weights, rotary buffers, dropout's numbers: all as if it had been built in memory."""
    runs = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device):
            model = case.make().train()
        lohan_fx.compile(
            model, profile(), nvme=tmp_path, compute_dtype=torch.float32, host_memory="1GiB", policy="keep"
        )
        losses = train(model, AdamW(model.parameters(), lr=LR), case, 2, seed=None)
        tied = len({id(p) for p in model.parameters()})
        runs.append((losses, tied, lohan_fx.release(model)))
    assert runs[0][:2] == runs[1][:2]
    same_weights(runs[0][2], runs[1][2])


def test_a_checkpoint_is_taken_up_by_a_model_on_meta(tmp_path: Path) -> None:
    def compiled_on(device: str, **options: Any) -> tuple[Any, AdamW]:
        with torch.device(device):
            model = Tiny()
            model.norm = nn.BatchNorm1d(4)
        options = {"nvme": tmp_path, **options}
        lohan_fx.compile(model, profile(), compute_dtype=torch.float32, host_memory="1GiB", policy="keep", **options)
        return model, AdamW(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: AdamW) -> float:
        loss = model(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    model, optimizer = compiled_on("cpu")
    step(model, optimizer)
    model.norm.running_mean.fill_(5)
    lohan_fx.checkpoint(model, optimizer)
    expected = step(model, optimizer)
    model._lohan_fx.detach()
    model, optimizer = compiled_on("meta", nvme=None, resume_from_checkpoint=tmp_path)
    lohan_fx.resume(model, optimizer)
    assert model.norm.running_mean.tolist() == [5] * 4
    assert step(model, optimizer) == expected
    model._lohan_fx.detach()
    shutil.rmtree(tmp_path)


def test_what_fails_leaves_the_model_on_meta(tmp_path: Path) -> None:
    model = _on_meta(lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)))
    before = [*model.parameters(), *model.buffers()]
    model[1].reset_parameters = lambda: None
    with pytest.raises(ValueError, match="unset"):
        lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="1GiB", compute_dtype=torch.float32)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], before, strict=True))
    assert not list(tmp_path.iterdir())
