"""The Plan as data: it survives JSON, and refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Division,
    Ends,
    Keep,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Prediction,
    Recompute,
    Share,
    Stage,
    Swap,
    Tier,
    Use,
    Windows,
    parse_decision,
)

NEXT_FORWARD = OptimizerTiming.NEXT_FORWARD
DECISIONS: tuple[Decision, ...] = (Keep(), Recompute(), Swap(Tier.HOST), Swap(Tier.NVME))
WINDOWS = Windows(
    fetch_bytes=0,
    swap_in_bytes=1 << 20,
    gradient_bytes=4096,
    chunk_elements=4096,
    io_bytes=1 << 20,
    io_buffers=1,
    optimizer_buffers=2,
    gradient_buffers=2,
    swap_out_bytes=1 << 20,
)


def activation(node: str, decision: Decision = Keep(), **others: Any) -> ActivationPlan:  # noqa: B008 (frozen)
    given: dict[str, Any] = {
        "op": "aten.mm",
        "layer": "h.0",
        "layer_kind": "Block",
        "bytes": 64,
        "flops": 640,
        **others,
    }
    return ActivationPlan(node=node, decision=decision, **given)


def plan(*activations: ActivationPlan, parameters: tuple[ParameterPlan, ...] = ()) -> Plan:
    return Plan("lohan", "cpu", "bfloat16", 1 << 30, 1 << 30, activations, parameters, WINDOWS)


def each_field(cls: type[Any], **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of the dataclass ``cls``. Every field has its strategy: one that is new must be generated, too."""
    names = {field.name for field in dataclasses.fields(cls)}
    assert strategies.keys() == names, (
        f"{cls.__name__}: {sorted(names ^ strategies.keys())} is a field or a strategy, not both"
    )
    return st.builds(cls, **strategies)


counts = st.integers(0, 1 << 60)
words = st.text(max_size=8)
seconds = st.floats(0, allow_nan=False)
tiers = st.sampled_from(Tier)
stages = each_field(Stage, lanes_s=st.dictionaries(words, seconds, max_size=5))
activations = each_field(
    ActivationPlan,
    node=words,
    op=words,
    layer=words,
    layer_kind=words,
    bytes=counts,
    flops=counts,
    decision=st.sampled_from(DECISIONS),
    mandatory=st.booleans(),
)
updated_once = each_field(
    ParameterPlan,
    name=words,
    layer=words,
    numel=counts,
    bytes=counts,
    trainable=st.booleans(),
    home=tiers,
    states_home=st.none() | tiers,
    optimizer_runs=st.sampled_from(OptimizerTiming),
    gradient_home=st.none() | tiers,
    updated_twice=st.just(False),
)
updated_twice = st.builds(
    dataclasses.replace,
    updated_once,
    states_home=st.just(Tier.NVME),
    optimizer_runs=st.just(OptimizerTiming.NEXT_FORWARD),
).map(lambda p: dataclasses.replace(p, updated_twice=p.may_be_updated_twice))
pages = st.integers(1, 1 << 20).map(lambda n: n * 4096)
buffers = st.integers(1, 64)
windows = each_field(
    Windows,
    fetch_bytes=counts,
    swap_in_bytes=counts,
    gradient_bytes=counts,
    chunk_elements=pages,
    io_bytes=pages,
    io_buffers=buffers,
    optimizer_buffers=buffers,
    gradient_buffers=buffers,
    swap_out_bytes=counts,
)
predictions = each_field(
    Prediction,
    forward=stages,
    backward=stages,
    optimizer=stages,
    peak_bytes=st.dictionaries(words, counts, max_size=3),
    nvme_read_bytes=counts,
    nvme_write_bytes=counts,
    flops=counts,
    recompute_flops=counts,
)
shares = each_field(Share, tier=tiers, use=st.sampled_from(Use), bytes=counts, saves_s=seconds)
divisions = each_field(
    Division,
    shares=st.lists(shares, max_size=3).map(tuple),
    per_byte_s=st.dictionaries(words, seconds, max_size=2),
    step_s=seconds,
    walk_s=seconds,
    bound_s=seconds,
)
plans = each_field(
    Plan,
    policy=words,
    device=words,
    compute_dtype=words,
    host_memory_bytes=counts,
    device_memory_bytes=counts,
    activations=st.lists(activations, max_size=4).map(tuple),
    parameters=st.lists(updated_once | updated_twice, max_size=4).map(tuple),
    windows=windows,
    prediction=st.none() | predictions,
    notes=st.lists(words, max_size=2).map(tuple),
    division=st.none() | divisions,
    forwards=st.integers(1, 9),
    outputs_bytes=counts,
    loss_only=st.booleans(),
)


@given(plans)
def test_json_gives_the_same_plan_back(made: Plan) -> None:
    """By ``repr``, too: a word is equal to the tier that it names, and is not that tier."""
    again = Plan.from_json(made.to_json())
    assert again == made
    assert repr(again) == repr(made)


def test_seconds_without_end_are_null_in_json() -> None:
    """Without a drive nothing ever comes from one; JSON has no infinity, and ``jq`` and browsers refuse Python's."""
    endless = Division((Share(Tier.HOST, Use.STATES, 1, math.inf),), {"host": 0.5}, 1.0, math.inf, 1.0)
    prediction = Prediction(Stage({"ssd": math.inf, "cpu": 1.0}), Stage({}), {}, 0, 0, 0, 0)
    made = dataclasses.replace(plan(), division=endless, prediction=prediction)
    raw = json.loads(made.to_json())
    json.dumps(raw, allow_nan=False)
    assert raw["division"]["shares"][0]["saves_s"] is None
    assert Plan.from_json(made.to_json()) == made
    raw["division"]["walk_s"] = math.inf  # as plans were written before
    assert Plan.from_json(json.dumps(raw)) == made


def test_json_says_decisions_and_tiers_in_words() -> None:
    parameter = ParameterPlan("w", "", 4, 8, True, Tier.NVME, Tier.HOST, OptimizerTiming.IN_BACKWARD)
    raw = json.loads(plan(activation("mm", Swap(Tier.NVME)), parameters=(parameter,)).to_json())
    assert raw["activations"][0]["decision"] == "swap:nvme"
    assert (raw["parameters"][0]["home"], raw["parameters"][0]["states_home"]) == ("nvme", "host")
    assert raw["parameters"][0]["optimizer_runs"] == "in_backward"


@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_a_decision_is_what_its_text_says(decision: Decision) -> None:
    assert parse_decision(str(decision)) == decision


@pytest.mark.parametrize("text", ["", "swap", "swap:device", "Keep"])
def test_an_unknown_decision_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"unknown decision '{text}'"):
        parse_decision(text)


def test_nothing_is_swapped_to_the_device() -> None:
    with pytest.raises(ValueError, match="is Keep"):
        Swap(Tier.DEVICE)


# --- from_json refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "null", '"plan"', "{}", '{"format": 99}', '{"format": 1}'])
def test_what_is_no_plan_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 2, "not of format 1"),
        ("activations", None, "not a plan"),
        ("activations", [{"node": "mm"}], "not a plan: 'decision'"),
        ("parameters", [{}], "not a plan: 'states_home'"),
        ("windows", {}, "not a plan"),
        ("prediction", {}, "not a plan: 'forward'"),
        ("division", {}, "not a plan: 'shares'"),
        ("forwards", 0, "Plan.forwards is 0"),
        ("forwards", -3, "Plan.forwards is -3"),
        ("forwards", 1.5, "Plan.forwards is 1.5"),
        ("surplus", 1, "not a plan.*surplus"),
    ],
)
def test_a_wrong_part_is_named(key: str, value: object, message: str) -> None:
    raw = json.loads(plan(activation("mm")).to_json())
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps({**raw, key: value}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("host_memory_bytes",), -1, "Plan.host_memory_bytes is -1: expected a whole number, 0 or more"),
        (("device",), None, "Plan.device is None: expected text"),
        (("activations", 0, "bytes"), float("inf"), "ActivationPlan.bytes is inf: expected a whole number"),
        (("activations", 0, "flops"), True, "ActivationPlan.flops is True: expected a whole number"),
        (("activations", 0, "mandatory"), 0, "ActivationPlan.mandatory is 0: expected true or false"),
        (("windows", "io_buffers"), 2.5, "Windows.io_buffers is 2.5: expected a whole number"),
        (("prediction", "forward", "lanes_s"), [1], r"Stage.lanes_s is \[1\]: expected names with numbers"),
        (
            ("prediction", "optimizer", "lanes_s", "ssd"),
            "1",
            "Stage.lanes_s is {'ssd': '1'}: expected names with numbers",
        ),
        (
            ("prediction", "peak_bytes"),
            None,
            "Prediction.peak_bytes is None: expected names with whole numbers, 0 or more",
        ),
        (
            ("prediction", "peak_bytes", "host"),
            0.5,
            "Prediction.peak_bytes is {'host': 0.5}: expected names with whole numbers",
        ),
        (("prediction", "flops"), None, "Prediction.flops is None: expected a whole number"),
        (("division", "shares", 0, "bytes"), -1, "Share.bytes is -1: expected a whole number"),
        (("division", "shares", 0, "saves_s"), "1", "Share.saves_s is '1': expected a number"),
        (("division", "per_byte_s"), None, "Division.per_byte_s is None: expected names with numbers"),
        (("division", "walk_s"), True, "Division.walk_s is True: expected a number"),
    ],
)
def test_a_wrong_value_is_named(path: tuple[str | int, ...], value: object, message: str) -> None:
    whole = dataclasses.replace(
        plan(activation("mm")),
        prediction=Prediction(Stage({}), Stage({}), {}, 0, 0, 0, 0),
        division=Division((Share(Tier.HOST, Use.FREE, 1, 0.0),), {}, 1.0, float("inf"), 1.0),
    )
    raw = json.loads(whole.to_json())
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(raw))


ADDED = ("forwards", "outputs_bytes", "loss_only")


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Plan) if field.name not in ADDED])
def test_a_missing_part_is_a_value_error(key: str) -> None:
    raw = json.loads(plan().to_json())
    del raw[key]
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize("key", ADDED)
def test_a_plan_of_before_there_was_more_to_say_counts_one_forward_and_the_loss(key: str) -> None:
    raw = json.loads(plan().to_json())
    del raw[key]
    assert Plan.from_json(json.dumps(raw)) == plan()


def test_values_are_checked_when_read_back() -> None:
    raw = json.loads(plan().to_json())
    raw["windows"]["io_bytes"] = 5000
    with pytest.raises(ValueError, match="io_bytes is 5000: expected a positive multiple of 4096"):
        Plan.from_json(json.dumps(raw))


# --- windows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fetch_bytes", -1, "zero or more"),
        ("swap_in_bytes", -4096, "zero or more"),
        ("gradient_bytes", -1, "zero or more"),
        ("chunk_elements", 0, "multiple of 4096"),
        ("chunk_elements", 4097, "multiple of 4096"),
        ("io_bytes", -4096, "multiple of 4096"),
        ("io_buffers", 0, "at least 1"),
        ("optimizer_buffers", 0, "at least 1"),
        ("gradient_buffers", 0, "at least 1"),
        ("swap_out_bytes", -1, "zero or more"),
    ],
)
def test_windows_refuse(name: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"Windows\.{name} is {value}: expected .*{message}"):
        dataclasses.replace(WINDOWS, **{name: value})


# --- asking and changing --------------------------------------------------------------------------------------


def test_decisions_are_found_by_node() -> None:
    made = plan(activation("mm", Recompute()), activation("add"))
    assert (made.decision("mm"), made.decision("add"), made.decision("sub")) == (Recompute(), Keep(), None)


def test_with_decisions_changes_these_and_drops_the_prediction() -> None:
    prediction = Prediction(Stage({}), Stage({}), {}, 0, 0, 0, 0)
    made = dataclasses.replace(plan(activation("mm"), activation("add")), prediction=prediction)
    changed = made.with_decisions({"add": Swap(Tier.NVME)})
    assert (changed.decision("mm"), changed.decision("add")) == (Keep(), Swap(Tier.NVME))
    assert changed.prediction is None
    assert made.decision("add") == Keep()


def test_with_decisions_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="no activation sub, zeros"):
        plan(activation("mm")).with_decisions({"zeros": Keep(), "mm": Keep(), "sub": Keep()})


def test_what_must_be_saved_cannot_be_recomputed() -> None:
    made = plan(activation("mm", mandatory=True))
    with pytest.raises(ValueError, match="activation mm must be saved"):
        made.with_decisions({"mm": Recompute()})
    assert made.with_decisions({"mm": Swap(Tier.HOST)}).decision("mm") == Swap(Tier.HOST)


def test_with_homes_leaves_frozen_parameters_without_states() -> None:
    trained = ParameterPlan("w", "", 4, 8, True, Tier.DEVICE, Tier.HOST, OptimizerTiming.IN_BACKWARD)
    frozen = ParameterPlan("b", "", 4, 8, False, Tier.DEVICE, None, OptimizerTiming.NONE)
    moved = plan(parameters=(trained, frozen)).with_homes(Tier.HOST, Tier.NVME)
    assert [(p.home, p.states_home) for p in moved.parameters] == [(Tier.HOST, Tier.NVME), (Tier.HOST, None)]
    assert moved.parameter("b").name == "b"
    with pytest.raises(KeyError, match="no parameter 'x'"):
        moved.parameter("x")


def test_the_busiest_lane_bounds_a_stage() -> None:
    stage = Stage({"compute": 1.0, "ssd": 2.0})
    assert (stage.seconds, stage.bottleneck) == (2.0, "ssd")
    assert (Stage({}).seconds, Stage({}).bottleneck) == (0.0, "none")


@pytest.mark.parametrize("bound", ["fetches", "updates"])
def test_the_drives_bind_where_their_work_does_with_compute_at_its_end(bound: str) -> None:
    stage = Stage({"compute": 2.25, "ssd": 2.0, bound: 2.5})
    assert (stage.seconds, stage.bound, stage.bottleneck) == (2.5, bound, "ssd")
    assert stage.work_s == {"compute": 2.25, "ssd": 2.0}


def test_the_lanes_of_a_step_are_those_of_all_its_stages_without_what_is_no_lane() -> None:
    forward, backward = Stage({"compute": 1.0, "ssd": 2.0, "fetches": 2.5}), Stage({"compute": 2.0, "updates": 3.0})
    after = Stage({"ssd": 4.0, "cpu": 0.5})
    prediction = Prediction(forward, backward, {}, 0, 0, 0, 0, optimizer=after)
    assert prediction.lanes_s == {"compute": 3.0, "ssd": 6.0, "cpu": 0.5}
    assert prediction.step_s == 2.5 + 3.0 + 4.0


def test_benefit_is_flops_per_byte() -> None:
    assert activation("mm").benefit == 10.0
    assert activation("mm", bytes=0).benefit == 0.0


def test_only_what_can_be_is_updated_twice() -> None:
    twice = ParameterPlan(
        "w", "", 64, 128, True, Tier.NVME, Tier.NVME, OptimizerTiming.NEXT_FORWARD, Tier.HOST, updated_twice=True
    )
    for wrong in (
        {"states_home": Tier.HOST},
        {"bytes": 256},
        {"optimizer_runs": OptimizerTiming.IN_BACKWARD, "gradient_home": None},
    ):
        with pytest.raises(ValueError, match=r"updated_twice of 'w'"):
            dataclasses.replace(twice, **wrong)


@pytest.mark.parametrize(
    ("waits", "device", "beside"),
    [
        (Tier.HOST, "cpu", OptimizerTiming.AFTER_BACKWARD),
        (Tier.NVME, "cpu", NEXT_FORWARD),
        (Tier.HOST, "cuda", NEXT_FORWARD),
    ],
)
def test_what_waits_on_a_drive_is_updated_beside_the_forward(waits: Tier, device: str, beside: OptimizerTiming) -> None:
    """In memory of the CPU as it may be: its gradient has to come back first, as the runtime and the simulator have it."""
    p = ParameterPlan("w", "", 1 << 20, 1 << 21, True, Tier.DEVICE, Tier.HOST, NEXT_FORWARD, waits)
    assert p.runs_beside(Ends(), device) is beside
