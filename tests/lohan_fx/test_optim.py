"""AdamW and Adam as ``torch.optim.Optimizer``: groups, schedulers, state dicts and checks; the numbers are torch's."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import OffloadedParameterError, StepError
from lohan_fx.optim import Adam, AdamW
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.micro_batches import MicroBatches
from lohan_fx.runtime.step_updates import StepUpdates
from tests.exhaustive import some_of
from tests.runtime.test_in_time import interrupted_at, lines_of
from tests.tiny import Tiny, batch, profile, same_weights

pytestmark = pytest.mark.usefixtures("leak_check")

schedulers = importlib.import_module("torch.optim.lr_scheduler")

KINDS: list[tuple[Any, Any]] = [(lohan_fx.AdamW, torch.optim.AdamW), (lohan_fx.Adam, torch.optim.Adam)]


@pytest.fixture
def models(tmp_path: Path) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A compiled model and its plain copy."""
    model: nn.Module = Tiny()
    plain = copy.deepcopy(model)
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32, policy="keep")
    yield model, plain
    lohan_fx.release(model)
    torch._dynamo.reset()


def train(model: nn.Module, optimizer: Any, seeds: range, scheduler: Any = None) -> list[float]:
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = model(batch(seed))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    assert [set(group) for group in ours["param_groups"]] == [set(group) for group in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        assert ours["state"][index].keys() == entry.keys()
        for name, value in entry.items():
            torch.testing.assert_close(ours["state"][index][name], value, rtol=0, atol=0)


# --- arithmetic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": torch.tensor(0.02), "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"lr": torch.tensor(0.013), "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": torch.tensor(0.013, dtype=torch.float64), "weight_decay": torch.tensor(0.1)},
        {"lr": torch.tensor([0.013]), "betas": (torch.tensor(0.91), torch.tensor(0.99)), "weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.0},
        {"fused": True, "weight_decay": 0.1},
        {"fused": True, "lr": torch.tensor(0.013), "weight_decay": 0.1},
    ],
)
def test_the_numbers_are_those_of_torch(
    ours: type[Adam], theirs: Any, options: dict[str, Any], models: tuple[nn.Module, nn.Module]
) -> None:
    model, plain = models
    reference = theirs(plain.parameters(), **options, **({} if "fused" in options else {"foreach": False}))
    optimizer = ours(model.parameters(), **options)
    assert train(model, optimizer, range(4)) == train(plain, reference, range(4))
    same_weights(model, plain)
    same_state(optimizer.state_dict(), reference.state_dict())


def test_groups_with_options_of_their_own(models: tuple[nn.Module, nn.Module]) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": (p for n, p in model.named_parameters() if n.endswith("weight")), "lr": 0.1, "eps": 1e-4},
        ]

    model, plain = models
    reference = torch.optim.AdamW(groups(plain), lr=0.01, foreach=False)
    optimizer = AdamW(groups(model), lr=0.01)
    assert train(model, optimizer, range(3)) == train(plain, reference, range(3))
    same_weights(model, plain)
    same_state(optimizer.state_dict(), reference.state_dict())


def test_a_step_that_is_interrupted_once_it_is_done_is_counted(
    models: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = AdamW(models[0].parameters())
    train(models[0], optimizer, range(1))
    models[0](batch(1)).backward()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(optimizer.engine.wear, "step_ends", interrupted)
        optimizer.step()
    assert optimizer.steps_done == 2
    assert all(optimizer.engine.residency[slot].updates == 2 for slot in optimizer.engine.slots)


@pytest.mark.parametrize(
    "work", [StepUpdates.finish_step, StepUpdates.forget, MicroBatches.step_ends, Adam._count, Engine.step]
)
def test_an_interrupt_at_any_line_of_a_step_leaves_it_counted_or_to_be_called_again(
    work: Callable[..., object], models: tuple[nn.Module, nn.Module]
) -> None:
    optimizer = AdamW(models[0].parameters())
    residency, updates = optimizer.engine.residency, optimizer.engine.updates
    for done, line in enumerate(lines_of(work.__code__)):
        models[0](batch(done)).backward()
        with interrupted_at(work.__code__, line), contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
        if updates.holds_any():
            assert optimizer.steps_done == done
            optimizer.step()
        assert optimizer.steps_done == updates.step == updates.finished == done + 1
        assert all(residency[slot].updates == done + 1 for slot in optimizer.engine.slots)


def test_named_parameters(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.named_parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.named_parameters(), lr=0.01, foreach=False)
    assert train(model, optimizer, range(2)) == train(plain, reference, range(2))
    same_state(optimizer.state_dict(), reference.state_dict())


def test_a_group_added_later(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.layers[0].parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.layers[0].parameters(), lr=0.01, foreach=False)
    assert train(model, optimizer, range(2)) == train(plain, reference, range(2))
    for one in (model, plain):
        one.zero_grad()  # torch kept the gradients of what nobody trained
    for number, (added_to, source) in enumerate([(optimizer, model), (reference, plain)]):
        added_to.add_param_group({"params": source.layers[1].parameters(), "lr": 0.5})
        assert len(added_to.param_groups) == 2, number
    assert train(model, optimizer, range(2, 5)) == train(plain, reference, range(2, 5))
    same_weights(model, plain)
    same_state(optimizer.state_dict(), reference.state_dict())


def _moved(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop())


def _emptied(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] = []


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("edit", [list.reverse, _moved, _emptied, lambda groups: groups.pop(0)])
def test_groups_that_are_edited(
    edit: Callable[[list[dict[str, Any]]], None], hold: bool, models: tuple[nn.Module, nn.Module]
) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": list(model.layers[0].parameters()), "lr": 0.1},
            {"params": list(model.layers[1].parameters()), "weight_decay": 0.5},
        ]

    model, plain = models
    reference = torch.optim.AdamW(groups(plain), lr=0.01, foreach=False)
    optimizer = AdamW(groups(model), lr=0.01)
    optimizer.engine.updates.holds = hold
    for number in range(2):
        assert train(model, optimizer, range(2)) == train(plain, reference, range(2)), number
        plain.zero_grad()
        edit(optimizer.param_groups)
        edit(reference.param_groups)
    same_weights(model, plain)


def test_a_parameter_that_leaves_its_group_too_late(models: tuple[nn.Module, nn.Module]) -> None:
    model, _ = models
    optimizer = AdamW(model.parameters(), accumulation_steps=1)
    model(batch(0)).backward()
    shells, optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"], []
    with pytest.raises(StepError, match=r"layers.* param group changed between backward and step .*it is in none"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = shells
    optimizer.step()


def test_a_group_whose_earlier_gradients_were_not_kept(models: tuple[nn.Module, nn.Module]) -> None:
    """PyTorch adds those of the steps before to its first: ``optimizer.zero_grad`` clears those of the groups alone."""
    model, plain = models
    optimizer = AdamW(model.layers[0].parameters(), lr=0.01, accumulation_steps=1)
    reference = torch.optim.AdamW(plain.layers[0].parameters(), lr=0.01, foreach=False)
    assert train(model, optimizer, range(2)) == train(plain, reference, range(2))
    with pytest.raises(
        ValueError, match=r"^layers\.1\.weight, layers\.1\.bias had gradients .* call model\.zero_grad\(\) first"
    ):
        optimizer.add_param_group({"params": model.layers[1].parameters()})
    model.layers[2].weight.grad = None
    optimizer.add_param_group({"params": [model.layers[2].weight]})
    reference.add_param_group({"params": [plain.layers[2].weight]})
    for one, its in ((model, optimizer), (plain, reference)):
        one.zero_grad()
        its.add_param_group({"params": one.layers[1].parameters()})
    assert train(model, optimizer, range(3)) == train(plain, reference, range(3))
    same_weights(model, plain)


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_group_that_is_added_too_late(backwards: int, models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.layers[0].parameters(), lr=0.01, accumulation_steps=backwards)
    reference = torch.optim.AdamW(plain.layers[0].parameters(), lr=0.01, foreach=False)
    model(batch(0)).backward()
    optimizer.add_param_group({"params": model.layers[1].parameters()})
    if backwards == 2:
        model(batch(0)).backward()
    with pytest.raises(
        StepError, match=r"layers\.1\.weight, layers\.1\.bias came into a param group between backward and"
    ):
        optimizer.step()
    group = optimizer.param_groups.pop()
    optimizer.step()
    for _ in range(backwards):
        plain(batch(0)).backward()
    reference.step()
    plain.zero_grad()
    optimizer.param_groups.append(group)
    reference.add_param_group({"params": plain.layers[1].parameters()})
    for seed in range(2):
        for one, its in ((model, optimizer), (plain, reference)):
            for _ in range(backwards):
                one(batch(seed)).backward()
            its.step()
            one.zero_grad()
    same_weights(model, plain)


@pytest.mark.parametrize("hold", [False, True])
def test_amsgrad_that_is_switched_on_later(hold: bool, models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW([{"params": layer.parameters()} for layer in model.layers], lr=0.01, accumulation_steps=1)
    optimizer.engine.updates.holds = hold
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["amsgrad"] = True  # of the parameters whose gradients come last
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        train(model, optimizer, range(1, 2))
    optimizer.param_groups[0]["amsgrad"] = False
    train(model, optimizer, range(1, 3))
    train(plain, reference, range(3))
    same_weights(model, plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=6),  # moves betas[0] too
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 4)],
            milestones=[2],
        ),
    ],
)
def test_schedulers(make: Callable[[Any], Any], models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.parameters(), lr=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    assert train(model, optimizer, range(5), make(optimizer)) == train(plain, reference, range(5), make(reference))
    same_weights(model, plain)


def test_warm_up_from_a_learning_rate_of_zero(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer, reference = (
        AdamW(model.parameters(), lr=0.0),
        torch.optim.AdamW(plain.parameters(), lr=0.0, foreach=False),
    )
    assert train(model, optimizer, range(2)) == train(plain, reference, range(2))
    same_weights(model, plain)


def test_hooks_before_and_after_step(models: tuple[nn.Module, nn.Module]) -> None:
    calls: list[str] = []
    optimizer = AdamW(models[0].parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(models[0], optimizer, range(2))
    assert calls == ["before", "after"] * 2


# --- state dicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_a_state_goes_from_torch_to_us_and_back(
    ours: type[Adam], theirs: Any, models: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    model, plain = models
    reference = theirs(plain.parameters(), lr=0.02, weight_decay=0.1, foreach=False)
    train(plain, reference, range(3))
    model.load_state_dict(plain.state_dict())
    optimizer = ours(model.parameters())
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    same_state(optimizer.state_dict(), reference.state_dict())
    assert train(model, optimizer, range(3, 6)) == train(plain, reference, range(3, 6))

    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    again = theirs(plain.parameters(), foreach=False)
    again.load_state_dict(torch.load(tmp_path / "saved.pt"))
    (tmp_path / "saved.pt").unlink()
    assert train(model, optimizer, range(6, 8)) == train(plain, again, range(6, 8))
    same_weights(model, plain)


def test_a_state_from_before_the_first_step(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer, reference = (
        AdamW(model.parameters(), lr=0.01),
        torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False),
    )
    fresh = optimizer.state_dict()
    assert fresh["state"] == {}
    train(model, optimizer, range(3))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(fresh)  # zero moments and no steps again
    assert train(model, optimizer, range(3)) == train(plain, reference, range(3))
    same_weights(model, plain)


def test_taking_a_state_leaves_nothing_in_memory(models: tuple[nn.Module, nn.Module]) -> None:
    model, _ = models
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(1))
    assert len(optimizer.state_dict()["state"]) == 6
    assert not optimizer.state


def test_states_that_are_not_there_are_neither_read_nor_changed(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    train(model, optimizer, range(2)), train(plain, reference, range(2))
    first = next(model.parameters())
    changes: list[Callable[[], object]] = [
        lambda: optimizer.state[first]["exp_avg"],
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(first, None),
        lambda: setattr(optimizer, "state", {}),
        lambda: optimizer.state.update({first: {}}),
    ]
    for change in changes:
        with pytest.raises(OffloadedParameterError, match=r"optimizer\.state_dict\(\) reads them"):
            change()
    assert not optimizer.state and list(optimizer.state.items()) == [] and first not in optimizer.state
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    reference.state.clear()
    assert train(model, optimizer, range(2, 4)) == train(plain, reference, range(2, 4))
    same_weights(model, plain)
    same_state(optimizer.state_dict(), reference.state_dict())


def states_of_another_kind(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """States that cannot be ours, each with what the refusal must say."""

    def trained(optimizer: torch.optim.Optimizer, source: nn.Module = model) -> dict[str, Any]:
        source.zero_grad()
        source(batch()).backward()
        optimizer.step()
        return optimizer.state_dict()

    other = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 17))
    other_state = trained(torch.optim.AdamW(other.parameters()), nn.Sequential(other, _Mean()))
    return [
        (trained(torch.optim.SGD(model.parameters(), momentum=0.9)), "no betas, eps: it is not of Adam"),
        (trained(torch.optim.AdamW(model.parameters(), amsgrad=True)), "amsgrad=True is not supported"),
        (other_state, r"exp_avg of layers\.2\.weight has shape \(17, 16\); the parameter has \(16, 16\)"),
        (trained(torch.optim.AdamW(model.layers[0].parameters())), "size"),
    ]


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_a_state_of_another_kind_changes_nothing(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    assert train(model, optimizer, range(2)) == train(plain, reference, range(2))
    before = optimizer.state_dict()
    for state, reason in states_of_another_kind(copy.deepcopy(plain)):
        with pytest.raises(ValueError, match=reason):
            optimizer.load_state_dict(state)
        same_state(optimizer.state_dict(), before)
    assert train(model, optimizer, range(2, 4)) == train(plain, reference, range(2, 4))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("exp_avg", None, "is a NoneType"),
        ("exp_avg_sq", [0.0] * 16, "is a list"),
        ("exp_avg", torch.zeros(16, device="meta"), "is on meta"),
        ("exp_avg", torch.zeros(16).to_sparse(), "is on cpu, torch.sparse_coo"),
        ("step", torch.tensor(float("nan")), r"is tensor\(nan\)"),
        ("step", float("inf"), "is inf"),
        ("step", torch.tensor(2.5), r"is tensor\(2\.5000\)"),
        ("step", -1, "is -1"),
        ("step", "2", "is '2'"),
        ("step", None, "is None"),
        ("step", torch.ones(2), r"is tensor\(\[1\., 1\.\]\)"),
        (None, [1.0], "is a list: it is not of Adam"),
    ],
)
def test_odd_values_in_a_state_are_named_and_nothing_is_written(
    name: str | None, value: Any, said: str, models: tuple[nn.Module, nn.Module]
) -> None:
    optimizer = AdamW(models[0].parameters(), lr=0.01)
    train(models[0], optimizer, range(2))
    before, odd = optimizer.state_dict(), optimizer.state_dict()
    for entry in odd["state"].values():
        entry["exp_avg"] += 1
    odd["state"][5] = value if name is None else {**odd["state"][5], name: value}
    with pytest.raises(ValueError, match=rf"the saved {name or 'state'} of layers\.2\.bias {said}"):
        optimizer.load_state_dict(odd)
    same_state(optimizer.state_dict(), before)


@pytest.mark.parametrize("step", [2, 2.0, torch.tensor(2), torch.tensor([2.0], dtype=torch.float64)])
def test_a_step_may_be_held_by_anything(step: Any, models: tuple[nn.Module, nn.Module]) -> None:
    optimizer = AdamW(models[0].parameters(), lr=0.01)
    train(models[0], optimizer, range(2))
    before = optimizer.state_dict()
    optimizer.load_state_dict({**before, "state": {i: {**entry, "step": step} for i, entry in before["state"].items()}})
    same_state(optimizer.state_dict(), before)


def test_groups_of_older_versions_get_what_they_lack(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    reference = torch.optim.AdamW(plain.parameters(), lr=0.02, foreach=False)
    train(plain, reference, range(2))
    old = reference.state_dict()
    old["param_groups"] = [
        {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
        for group in old["param_groups"]
    ]
    reference.load_state_dict(copy.deepcopy(old))
    model.load_state_dict(plain.state_dict())
    optimizer = AdamW(model.parameters())
    optimizer.load_state_dict(old)
    assert train(model, optimizer, range(2, 4)) == train(plain, reference, range(2, 4))
    same_weights(model, plain)


def test_what_is_loaded_is_what_hooks_make_of_it(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    source = torch.optim.AdamW(list(plain.parameters())[::-1], lr=0.02, foreach=False)
    train(plain, source, range(2))
    model.load_state_dict(plain.state_dict())
    reference = torch.optim.AdamW(plain.named_parameters(), foreach=False)
    optimizer = AdamW(model.named_parameters())
    seen: list[int] = []

    def in_our_order(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {5 - index: entry for index, entry in state["state"].items()}}

    for loaded in (reference, optimizer):
        loaded.register_load_state_dict_pre_hook(in_our_order)
        loaded.register_load_state_dict_post_hook(lambda done: seen.append(len(done.state_dict()["state"])))
        loaded.load_state_dict(source.state_dict())
    assert seen == [6, 6]
    same_state(optimizer.state_dict(), reference.state_dict())
    assert train(model, optimizer, range(2, 4)) == train(plain, reference, range(2, 4))
    same_weights(model, plain)


def test_an_empty_entry_is_no_state(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    saved = torch.optim.AdamW(plain.parameters(), lr=0.02, foreach=False).state_dict()
    saved["state"] = {0: {}}  # as after a look at ``optimizer.state[parameter]`` before the first step
    reference, optimizer = torch.optim.AdamW(plain.parameters(), foreach=False), AdamW(model.parameters())
    for loaded in (reference, optimizer):
        loaded.load_state_dict(saved)
    assert train(model, optimizer, range(2)) == train(plain, reference, range(2))
    same_weights(model, plain)


def test_adamw_stays_adamw_whatever_it_loads(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    source = torch.optim.Adam(plain.parameters(), weight_decay=0.3, foreach=False)
    reference, optimizer = torch.optim.AdamW(plain.parameters()), AdamW(model.parameters())
    for loaded in (reference, optimizer):
        loaded.load_state_dict(source.state_dict())
    assert optimizer.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


def test_how_weights_decay_is_loaded_with_the_rest(models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    source = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.3, foreach=False)
    train(plain, source, range(2))
    reference = torch.optim.Adam(plain.parameters(), foreach=False)
    reference.load_state_dict(source.state_dict())
    model.load_state_dict(plain.state_dict())
    optimizer = Adam(model.parameters())
    optimizer.load_state_dict(source.state_dict())
    assert train(model, optimizer, range(2, 4)) == train(plain, reference, range(2, 4))
    same_weights(model, plain)


def test_the_state_of_a_parameter_that_is_frozen_by_now_is_left_out(tmp_path: Path) -> None:
    plain: Any = Tiny()
    source = torch.optim.AdamW(plain.parameters(), lr=0.02, foreach=False)
    train(plain, source, range(2))
    model: Any = copy.deepcopy(plain)
    model.zero_grad()
    for one in (plain, model):
        one.layers[1].requires_grad_(False)
    reference = torch.optim.AdamW(plain.parameters(), foreach=False)
    reference.load_state_dict(source.state_dict())
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32, policy="keep")
    with lohan_fx.releasing(model):
        optimizer = AdamW(model.parameters())
        with pytest.warns(UserWarning, match=r"moments of layers\.1\.weight, layers\.1\.bias are left out: frozen"):
            optimizer.load_state_dict(source.state_dict())
        assert train(model, optimizer, range(2, 4)) == train(plain, reference, range(2, 4))
    same_weights(model, plain)


@pytest.mark.parametrize("fused", some_of([False, True], [True]))
def test_steps_are_counted_exactly_whatever_the_default_dtype(fused: bool, models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=fused, foreach=False)
    inputs = [batch(seed) for seed in range(260)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        for one, its in ((model, optimizer), (plain, reference)):
            for x in inputs:  # 8 bits of step 257 are those of 256
                its.zero_grad()
                one(x).backward()
                its.step()
        assert {entry["step"].item() for entry in optimizer.state_dict()["state"].values()} == {260.0}
    finally:
        torch.set_default_dtype(torch.float32)
    same_weights(model, plain)


# --- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"lr is -0\.1: expected zero or more"),
        ({"lr": float("nan")}, "lr is nan: expected zero or more"),
        ({"eps": -1.0}, r"eps is -1\.0: expected zero or more"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1\.0: expected \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas is \(0\.9,\): expected two numbers"),
        ({"betas": 0.9}, r"betas is 0\.9: expected two numbers"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0\.1: expected \[0, 1\)"),
        ({"weight_decay": -1}, "weight_decay is -1: expected zero or more"),
        ({"amsgrad": True}, "amsgrad=True is not supported.*use amsgrad=False"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0: expected a whole number, at least 1"),
        ({"accumulation_steps": 8 / 2}, r"accumulation_steps is 4\.0: expected a whole number"),
        ({"accumulation_steps": True}, "accumulation_steps is True: expected a whole number"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str, models: tuple[nn.Module, nn.Module]) -> None:
    model, _ = models
    for kind in (lohan_fx.AdamW, lohan_fx.Adam):
        with pytest.raises(ValueError, match=message):
            kind(model.parameters(), **options)
    optimizer = AdamW(model.layers[0].parameters())  # nothing of those refused is left behind
    if "accumulation_steps" not in options:
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": model.layers[1].parameters(), **options})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "1e-3"}, "lr is '1e-3': expected a number"),
        ({"eps": "1e-8"}, "eps is '1e-8': expected a number"),
        ({"betas": (0.9, "0.99")}, r"betas\[1\] is '0.99': expected a number"),
        ({"weight_decay": "1e-2"}, "weight_decay is '1e-2': expected a number"),
    ],
)
def test_options_that_are_text(options: dict[str, Any], message: str, models: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(TypeError, match=message):
        AdamW(models[0].parameters(), **options)


def test_options_that_torch_has_and_we_do_not(models: tuple[nn.Module, nn.Module]) -> None:
    for option in ("foreach", "capturable", "differentiable", "momentum"):
        with pytest.raises(TypeError, match=option):
            AdamW(models[0].parameters(), **{option: True})  # type: ignore[arg-type]


def test_groups_that_are_no_good(models: tuple[nn.Module, nn.Module]) -> None:
    model, _ = models
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    with pytest.raises(ValueError, match=r"AdamW got no parameters: pass model\.parameters\(\)"):
        AdamW([{"params": []}])
    optimizer = AdamW(model.layers[0].parameters())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model.parameters()})
    with pytest.raises(TypeError, match="not of a compiled model"):
        optimizer.add_param_group({"params": [*model.layers[1].parameters(), nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model.layers[1].parameters()})
    with pytest.raises(ValueError, match=r"has an optimizer already: use that one.*configure_optimizers.*the same one"):
        AdamW(model.layers[2].parameters())


def test_an_optimizer_cannot_be_copied_with_its_parameters(models: tuple[nn.Module, nn.Module]) -> None:
    optimizer = AdamW(models[0].parameters())
    with pytest.raises(OffloadedParameterError, match="deepcopy"):
        copy.deepcopy(optimizer)


# --- accumulation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [None, 3])
def test_three_backwards_per_step(told: int | None, models: tuple[nn.Module, nn.Module]) -> None:
    model, plain = models
    optimizer = AdamW(model.parameters(), lr=0.01, accumulation_steps=told)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    for step in range(3):
        for kind, trainer in ((model, optimizer), (plain, reference)):
            for micro in range(3):
                kind(batch(10 * step + micro)).backward()
                if kind is model:
                    applied = compiled(model).engine.micro_batches.applied
                    assert applied is (micro == 2 and (told is not None or step > 0))
            trainer.step()
            trainer.zero_grad()
    same_weights(model, plain)


def test_more_backwards_than_were_told(models: tuple[nn.Module, nn.Module]) -> None:
    model, _ = models
    optimizer = AdamW(model.parameters(), lr=0.01, accumulation_steps=2)
    for seed in range(2):
        model(batch(seed)).backward()
    with pytest.raises(StepError, match=r"number 2 \(the last step had 2\).*accumulation_steps=n"):
        model(batch(2))
    optimizer.step()
    model(batch(3)).backward()


class Routed(nn.Module):
    """Each batch takes one of two ways, so that a micro-batch leaves some parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.end = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        y: torch.Tensor = self.end(self.ways[way](x)).square().mean()
        return y


def test_a_parameter_that_only_an_earlier_micro_batch_used(tmp_path: Path) -> None:
    model: Any = Routed()
    plain = copy.deepcopy(model)
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32, policy="keep")
    optimizer = AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    for step in range(4):
        for kind, trainer in ((model, optimizer), (plain, reference)):
            for way in ((0, 1), (1, 0), (0, 0), (1, 1))[step]:
                kind(batch(step), way).backward()
            trainer.step()
            trainer.zero_grad()
    same_weights(model, plain)
    same_state(optimizer.state_dict(), reference.state_dict())
    lohan_fx.release(model)
