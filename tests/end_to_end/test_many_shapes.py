"""Inputs of many sizes: one set of graphs for all that are no larger than the largest one, exact, by any policy."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

import lohan_fx
from lohan_fx.buffered import Buffered
from lohan_fx.compile import compiled
from lohan_fx.errors import CaptureError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes import assign_buffers, symbolic_sizes
from lohan_fx.passes.symbolic_sizes import CallSizes, is_symbolic
from lohan_fx.planning import budgets
from tests.end_to_end.models import GPT2, LLAMA, LLAMA_SHALLOW, PERCEPTRON, Case, tokens, vectors
from tests.end_to_end.recipes import LR, assert_same_weights, weights_of
from tests.exhaustive import combinations, some_of

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

SIZES = ((4, 20), (4, 32), (4, 28), (3, 32), (4, 17), (2, 8), (4, 32), (4, 20))
"""(batch, length) of each step; of longer ones Llama's eager attention is another than the traced one. The fourth has fewer
sequences, which makes that size symbolic, too."""
GRAPHS = 3
"""For the first, for other lengths, and for other numbers of sequences."""
POLICIES = ((GPT2, "lohan"), (GPT2, "swap-nvme"), (LLAMA, "recompute"), (LLAMA, "fuyou"))


def steps(model: nn.Module, optimizer: Any, sizes: Any = SIZES) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for batch, length in sizes:
        loss = model(**tokens(batch, length)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def all_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of these models are so small that the heap would have them."""
    monkeypatch.setattr(assign_buffers, "SIZES", (range(1, 1 << 40),))


@pytest.mark.usefixtures("all_have_places")
@pytest.mark.parametrize(
    ("case", "policy"), some_of(POLICIES, POLICIES[1:2]), ids=lambda one: getattr(one, "name", one)
)
def test_training_is_exact_and_smaller_inputs_need_no_graphs(
    case: Case, policy: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    plain, model = case.build(), case.build()
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=LR))
    options: dict[str, Any] = {"compute_dtype": torch.float32, "policy": policy, "host_memory": "2GiB"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        assert steps(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == expected
        graphs = compiled(model).halves
        assert len(graphs) == GRAPHS and is_symbolic(graphs[-1].forward)
        assert any(one.offsets for one in graphs[-1].assigned.values())
    assert_same_weights(weights_of(model), weights_of(plain))


def test_one_that_is_larger_is_planned_anew(hw: HardwareProfile, tmp_path: Path) -> None:
    model = LLAMA_SHALLOW.build()
    options: dict[str, Any] = {"compute_dtype": torch.float32, "policy": "keep", "host_memory": "2GiB", "dynamic": True}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        steps(model, optimizer, [(2, 16), (2, 12), (2, 16)])
        assert len(compiled(model).plans) == 1
        steps(model, optimizer, [(2, 17)])
        first, second = compiled(model).plans
        assert first.kept_bytes < second.kept_bytes
        steps(model, optimizer, [(2, 17), (2, 9), (2, 16)])
        assert len(compiled(model).plans) == 2


def test_the_largest_first_is_the_only_plan(hw: HardwareProfile, tmp_path: Path) -> None:
    model = LLAMA_SHALLOW.build()
    options: dict[str, Any] = {"compute_dtype": torch.float32, "host_memory": "2GiB", "dynamic": True}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        largest = max(SIZES, key=math.prod)
        plan = lohan_fx.prepare(model, **tokens(*largest))
        steps(model, lohan_fx.AdamW(model.parameters(), lr=LR))
        (only,) = compiled(model).plans
        assert only is plan


def test_each_shape_may_have_a_plan_of_its_own(hw: HardwareProfile, tmp_path: Path) -> None:
    model = PERCEPTRON.build()
    with lohan_fx.releasing(
        lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="2GiB", dynamic=False)
    ):
        plans = [lohan_fx.prepare(model, **vectors(batch=batch)) for batch in (6, 5, 4, 5)]
        assert len({id(plan) for plan in plans}) == 3 and plans[1] is plans[3]


def test_graphs_for_other_shapes_go_where_there_is_no_room_for_all(
    hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "AGAIN_BYTES_PER_PARAMETER", 1 << 29)  # two of them are more than is promised
    plain, model = LLAMA_SHALLOW.build(), LLAMA_SHALLOW.build()
    sizes = [(4, 20), (4, 32), (2, 20), (4, 20)]
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=LR), sizes)
    options: dict[str, Any] = {"compute_dtype": torch.float32, "host_memory": "2GiB", "dynamic": False}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        with pytest.warns(UserWarning, match="no room for the graphs of one more input shape beside 1 others") as told:
            assert steps(model, lohan_fx.AdamW(model.parameters(), lr=LR), sizes) == expected
        where = [one for one in told if "one more input shape" in str(one.message)]
        assert all(0 <= one.lineno - steps.__code__.co_firstlineno < 10 for one in where), where
        assert {Path(one.filename).name for one in where} == {Path(__file__).name}
        assert len(compiled(model).plans) == 1
    assert_same_weights(weights_of(model), weights_of(plain))


class FillsUp(nn.Module):
    """To a given length, as a masked autoencoder's decoder does: the shorter what is seen, the more of the rest there is."""

    LENGTH, WIDTH = 64, 32

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(self.WIDTH, self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH)
        self.mask = nn.Parameter(torch.randn(1, 1, self.WIDTH))
        self.position = nn.Parameter(torch.randn(1, self.LENGTH, self.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.encode(x) + self.position[:, : x.shape[1]]
        rest = (self.mask + self.position[:, x.shape[1] :]).expand(len(x), -1, -1)
        found: torch.Tensor = torch.tanh(torch.cat([seen, self.decode(rest * 2.0)], 1)).square().mean()
        return found


NEGLIGIBLE_BYTES = {6: 0, 2: 1 << 20}
"""By how many graphs it takes to train ``FillsUp`` on the sizes below."""


@pytest.mark.usefixtures("all_have_places")
@pytest.mark.parametrize(("policy", "graphs"), combinations(["lohan", "keep", "swap-nvme"], list(NEGLIGIBLE_BYTES)))
def test_what_takes_more_for_smaller_inputs(
    policy: str, graphs: int, hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values have no place in what is planned for larger ones; where they take much, they are planned by themselves."""
    monkeypatch.setattr(symbolic_sizes, "NEGLIGIBLE_BYTES", NEGLIGIBLE_BYTES[graphs])
    torch.manual_seed(0)
    plain, model = FillsUp(), FillsUp()
    model.load_state_dict(plain.state_dict())
    expected = torch.optim.AdamW(plain.parameters(), lr=LR)
    options: dict[str, Any] = {"compute_dtype": torch.float32, "host_memory": "2GiB", "policy": policy}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for length in (40, 48, 32, 20, 8, 4, 48):
            x = torch.randn(4, length, FillsUp.WIDTH)
            losses = [net(x) for net in (plain, model)]
            assert losses[0].item() == losses[1].item()
            for loss, adam in zip(losses, (expected, optimizer), strict=True):
                loss.backward()
                adam.step()
                adam.zero_grad()
        assert len(compiled(model).plans) == graphs
        with torch.no_grad():
            for length in (40, 48, 32, 4):
                x = torch.randn(4, length, FillsUp.WIDTH)
                assert torch.equal(model(x), plain(x))
    assert_same_weights(weights_of(model), weights_of(plain))


@pytest.mark.usefixtures("all_have_places")
def test_an_interrupt_as_places_are_bound_leaves_none_of_the_wrong_shape(
    hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLAMA_SHALLOW.build()
    options: dict[str, Any] = {"compute_dtype": torch.float32, "host_memory": "2GiB", "dynamic": True}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        inputs = {length: tokens(4, length) for length in (32, 20)}
        expected = {length: model(**inputs[length]).loss.item() for length in inputs}
        for owner, method in ((Buffered, "_bind"), (CallSizes, "shaped")):
            done = getattr(owner, method)

            def interrupted(*args: Any, done: Any = done) -> None:
                done(*args)
                raise KeyboardInterrupt

            for again in (20, 32):
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(owner, method, interrupted)
                    model(**inputs[32])
                assert model(**inputs[again]).loss.item() == expected[again]
                assert model(**inputs[20]).loss.item() == expected[20]


def test_a_backward_may_run_twice(hw: HardwareProfile, tmp_path: Path) -> None:
    plain, model = LLAMA_SHALLOW.build(), LLAMA_SHALLOW.build()
    expected = torch.optim.AdamW(plain.parameters(), lr=LR)
    options: dict[str, Any] = {"compute_dtype": torch.float32, "policy": "keep", "host_memory": "2GiB"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=2)
        for length in (20, 32, 24):
            inputs = tokens(4, length)
            for net, adam in ((plain, expected), (model, optimizer)):
                loss = net(**inputs).loss
                loss.backward(retain_graph=True)
                loss.backward()
                adam.step()
                adam.zero_grad()
    assert_same_weights(weights_of(model), weights_of(plain))


def symbolic(model: nn.Module) -> list[tuple[bool, bool]]:
    """Of each graph: whether it trains, and whether it holds for many sizes."""
    return [(halves.backward is not None, is_symbolic(halves.forward)) for halves in compiled(model).halves]


def test_what_one_call_has_seen_says_nothing_of_another(hw: HardwareProfile, tmp_path: Path) -> None:
    """Neither evaluation of training, nor one model of another."""
    for _ in range(2):
        model = PERCEPTRON.build()
        with lohan_fx.releasing(
            lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="2GiB")
        ):
            with torch.no_grad():
                model(**vectors(batch=6))
            lohan_fx.prepare(model, **vectors(batch=5))
            lohan_fx.prepare(model, **vectors(batch=4))
            assert symbolic(model) == [(False, False), (True, False), (True, True)]


def test_one_bad_batch_costs_no_graphs(hw: HardwareProfile, tmp_path: Path) -> None:
    model = LLAMA_SHALLOW.build()
    options: dict[str, Any] = {"compute_dtype": torch.float32, "policy": "keep", "host_memory": "2GiB"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        steps(model, optimizer, [(4, 20), (4, 24)])
        bad = {**tokens(4, 22), "position_ids": torch.arange(7)[None]}
        with pytest.raises(TorchDynamoException, match="7"), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model(**bad)
        assert not [one for one in warned if "each shape gets graphs" in str(one.message)]
        steps(model, optimizer, [(4, 23), (4, 21), (4, 20)])
        assert symbolic(model) == [(True, False), (True, True)]


class CountsItsRows(nn.Module):
    """What it makes of their number, Dynamo can only say of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).square().mean() / math.factorial(x.shape[0])
        return found


def test_a_model_that_cannot_be_traced_for_many_sizes_is_for_each(hw: HardwareProfile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = CountsItsRows(), CountsItsRows()
    model.load_state_dict(plain.state_dict())
    expected = torch.optim.AdamW(plain.parameters(), lr=LR)
    with (
        lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="2GiB")),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for rows in (3, 4, 5, 4, 3):
            for net, adam in ((plain, expected), (model, optimizer)):
                torch.manual_seed(rows)
                loss = net(torch.randn(rows, 8))
                loss.backward()
                adam.step()
                adam.zero_grad()
    assert_same_weights(weights_of(model), weights_of(plain))
    told = [str(one.message) for one in warned if "each shape gets graphs" in str(one.message)]
    assert len(told) == 1


def test_that_holds_for_evaluation_too_and_whatever_was_captured_before(hw: HardwareProfile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = CountsItsRows(), CountsItsRows()
    model.load_state_dict(plain.state_dict())
    x = {rows: torch.randn(rows, 8) for rows in range(3, 9)}
    with (
        lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="2GiB")),
        pytest.warns(UserWarning, match="each shape gets graphs") as told,
    ):
        lohan_fx.prepare(model, x[3])
        lohan_fx.prepare(model, x[4])
        with torch.no_grad():
            for rows in (5, 6, 7, 6, 5):
                assert torch.equal(model(x[rows]), plain(x[rows]))
        assert torch.equal(model(x[8]), plain(x[8]))
        assert not any(many for _, many in symbolic(model))
    assert len([one for one in told if "each shape gets graphs" in str(one.message)]) == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_cannot_be_traced_at_all_is_refused_once(
    dynamic: bool | None, hw: HardwareProfile, tmp_path: Path
) -> None:
    class Breaks(CountsItsRows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    with (
        lohan_fx.releasing(lohan_fx.compile(Breaks(), hw, nvme=tmp_path, dynamic=dynamic)) as model,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for rows in (3, 4):
            with pytest.raises(CaptureError, match="cannot be captured as one graph"):
                model(torch.randn(rows, 8))


def test_python_numbers_that_change_are_inputs(hw: HardwareProfile, tmp_path: Path) -> None:
    class Scaled(CountsItsRows):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            found: torch.Tensor = self.layer(x).square().mean() * by
            return found

    torch.manual_seed(0)
    plain, model = Scaled(), Scaled()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8)
    with lohan_fx.releasing(
        lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="2GiB")
    ):
        expected, optimizer = torch.optim.AdamW(plain.parameters(), lr=LR), lohan_fx.AdamW(model.parameters(), lr=LR)
        for by in (0.5, 1.5, 0.3, 2.75, 0.1):
            losses = [net(x, by) for net in (plain, model)]
            assert losses[0].item() == losses[1].item()
            for loss, adam in zip(losses, (expected, optimizer), strict=True):
                loss.backward()
                adam.step()
                adam.zero_grad()
        assert len(compiled(model).plans) == 2
    assert_same_weights(weights_of(model), weights_of(plain))


class Masked(nn.Module):
    """Two inputs have one number of rows: of the two symbols the forward's view reads one, and the backward the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).view(x.size(0), 8, 8).sin()
        return (hidden + mask[:, None, None]).square().sum()


def test_a_size_that_only_a_view_of_the_forward_reads(hw: HardwareProfile, tmp_path: Path) -> None:
    plain = Masked()
    model = copy.deepcopy(plain)

    def trained(one: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for rows in (6, 5, 4):
            loss = one(torch.linspace(-1, 1, rows * 24).view(rows, 24), torch.ones(rows))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=LR))
    options: dict[str, Any] = {"compute_dtype": torch.float32, "policy": "keep", "host_memory": "2GiB"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        assert trained(model, lohan_fx.AdamW(model.parameters(), lr=LR)) == expected
        assert symbolic(model) == [(True, False), (True, True)]
    assert_same_weights(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("dynamic", ["yes", 2])
def test_what_dynamic_may_be(dynamic: Any, hw: HardwareProfile) -> None:
    with pytest.raises(ValueError, match="dynamic is"):
        lohan_fx.compile(PERCEPTRON.build(), hw, dynamic=dynamic)


def test_a_given_plan_is_of_one_shape(hw: HardwareProfile, tmp_path: Path) -> None:
    model = LLAMA_SHALLOW.build()
    options: dict[str, Any] = {
        "compute_dtype": torch.float32,
        "policy": "keep",
        "host_memory": "2GiB",
        "nvme": tmp_path,
    }
    with lohan_fx.releasing(lohan_fx.compile(model, hw, **options)):
        plan = lohan_fx.prepare(model, **tokens(2, 16))
    with pytest.raises(ValueError, match="dynamic=True"):
        lohan_fx.compile(LLAMA_SHALLOW.build(), hw, plan=plan, dynamic=True, **options)
