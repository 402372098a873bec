"""The Plan: every decision the compiler takes, as data.

A Plan is made by the planner, read by the rewriting passes, obeyed by the runtime and printed by ``dump``.
Nothing else decides. It is frozen, and ``Plan.from_json(plan.to_json()) == plan``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

FORMAT = 1
SUM_BYTES = 4
"""Per parameter: a sum of gradients is fp32."""


class Tier(enum.StrEnum):
    """Where bytes live: memory of the compute device, host RAM, or NVMe."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class OptimizerTiming(enum.StrEnum):
    """When the optimizer of a parameter runs.

    ``IN_BACKWARD``: as soon as its gradient is there, beside the rest of the backward.
    ``AFTER_BACKWARD``: in a stage of its own once the whole backward is done, as ZeRO does; what LoHan avoids.
    ``NEXT_FORWARD``: begun by ``step()``, beside the next forward and before that fetches the parameter.
    ``NONE``: never, of a frozen parameter.
    """

    IN_BACKWARD = "in_backward"
    AFTER_BACKWARD = "after_backward"
    NEXT_FORWARD = "next_forward"
    NONE = "none"


@dataclass(frozen=True)
class Keep:
    """The activation stays on the device until the backward has used it."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class Swap:
    """The activation leaves the device after its last forward use and returns before its first backward use."""

    tier: Tier

    def __post_init__(self) -> None:
        if self.tier is Tier.DEVICE:
            raise ValueError("Swap(tier) takes host or nvme; an activation that stays on the device is Keep()")

    def __str__(self) -> str:
        return f"swap:{self.tier.value}"


@dataclass(frozen=True)
class Recompute:
    """The activation is dropped and computed again in the backward."""

    def __str__(self) -> str:
        return "recompute"


Decision = Keep | Swap | Recompute


def parse_decision(text: str) -> Decision:
    """The inverse of ``str(decision)``: ``keep``, ``swap:host``, ``swap:nvme`` or ``recompute``."""
    if text == "keep":
        return Keep()
    if text == "recompute":
        return Recompute()
    if text in ("swap:host", "swap:nvme"):
        return Swap(Tier(text.split(":")[1]))
    raise ValueError(f"unknown decision {text!r}: expected keep, swap:host, swap:nvme or recompute")


@dataclass(frozen=True)
class ActivationPlan:
    """What happens to one forward value that the backward can use.

    ``flops`` are what producing it once costs; ``bytes`` its storage; ``mandatory``: it cannot be recomputed; ``benefit`` is
    LoHan's offloading benefit OB_i = FLOP_i / A_i (mechanisms B4), in FLOP per byte.
    """

    node: str
    op: str
    layer: str
    layer_kind: str
    bytes: int
    flops: int
    decision: Decision
    mandatory: bool = False

    @property
    def benefit(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Blocking:
    """A parameter whose gradient leaves no room in the window for the next one: compute waits until it is updated.
    ``hidden_s``: seconds of the backward from one to the other. ``elements_after``: of the gradients after it, up to the
    first that leaves room, in whole chunks: what is written last drains from the optimizer's buffers as compute goes on."""

    hidden_s: float
    elements_after: int

    def written(self, numel: int, windows: Windows) -> float:
        """Share of the writes for ``numel`` elements that must be over before compute goes on."""
        in_buffers = windows.optimizer_buffers * windows.chunk_elements - self.elements_after
        return 1 - min(max(in_buffers, 0), numel) / numel


@dataclass(frozen=True)
class Ends:
    """The parameters at both ends of a step, where no compute is left to hide anything beside: those that the forward
    waits for first, and those whose gradients the backward makes last. ``last_fetch_s``: seconds of the forward after it has
    waited for all but a negligible part of what it fetches; ``first_gradient_s``: of the backward, recomputation aside,
    before it makes more than a negligible part of the gradients. ``blocking``: the parameters for whose updates compute
    waits."""

    first_fetches: frozenset[str] = frozenset()
    last_gradients: frozenset[str] = frozenset()
    last_fetch_s: float = 0.0
    first_gradient_s: float = 0.0
    blocking: Mapping[str, Blocking] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterPlan:
    """Where one parameter (its compute-dtype copy) and its optimizer states live, and when it is updated.

    ``gradient_home``: where the gradient waits for that, as a fp32 sum ``AFTER_BACKWARD``, as the backward made it in the
    ``NEXT_FORWARD``; None where it does not wait. ``updated_twice``: the update in the ``NEXT_FORWARD`` writes what that
    computes with and no states; they are updated by the same update once more, beside the backward.
    """

    name: str
    layer: str
    numel: int
    bytes: int
    trainable: bool
    home: Tier
    states_home: Tier | None
    optimizer_runs: OptimizerTiming
    gradient_home: Tier | None = None
    updated_twice: bool = False

    def __post_init__(self) -> None:
        if self.updated_twice and not self.may_be_updated_twice:
            raise ValueError(
                f"ParameterPlan.updated_twice of {self.name!r}: only an update in the next forward can be made twice, of states "
                "on NVMe and a parameter that is not the master itself"
            )

    @property
    def may_be_updated_twice(self) -> bool:
        """Whether the forward waits for less of its update than must be written: a copy of its own, beside states on NVMe."""
        waits = self.optimizer_runs is OptimizerTiming.NEXT_FORWARD
        return waits and self.states_home is Tier.NVME and self.bytes != SUM_BYTES * self.numel

    def in_memory_of(self, device: str) -> bool:
        """Whether ``device`` has the parameter and its states in its memory (a CPU's is host RAM): then nothing moves for
        an update, and the device does it where the gradient is made."""
        near = (Tier.DEVICE, Tier.HOST) if device == "cpu" else (Tier.DEVICE,)
        return self.home in near and self.states_home in near

    def stays_in_memory_of(self, device: str) -> bool:
        """Whether nothing at all moves for an update on ``device``: its gradient does not wait on NVMe either."""
        return self.in_memory_of(device) and self.gradient_home is not Tier.NVME

    def returns_to(self, device: str) -> bool:
        """Whether the updated parameter is copied to ``device``, a GPU where it stays: the CPU has updated it."""
        stays = self.home is Tier.DEVICE and self.states_home is not Tier.DEVICE
        return device != "cpu" and self.trainable and stays

    def runs_beside(self, ends: Ends, device: str) -> OptimizerTiming:
        """The stage that its update lengthens: not the backward, if its gradient is one of the last and something has to
        move for the update; not the next forward, if that begins with it or nothing has to move."""
        here = self.stays_in_memory_of(device)
        match self.optimizer_runs:
            case OptimizerTiming.IN_BACKWARD if self.name in ends.last_gradients and not here:
                return OptimizerTiming.AFTER_BACKWARD
            case OptimizerTiming.NEXT_FORWARD if self.name in ends.first_fetches or here:
                return OptimizerTiming.AFTER_BACKWARD
        return self.optimizer_runs

    def first_fetched_nvme_bytes(self, ends: Ends) -> int:
        """Bytes that the drives bring before the forward has anything to compute."""
        return self.bytes if self.home is Tier.NVME and self.name in ends.first_fetches else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the gradient where it waits; 0 where it does not."""
        if self.gradient_home is None:
            return 0
        return self.bytes if self.optimizer_runs is OptimizerTiming.NEXT_FORWARD else SUM_BYTES * self.numel


WHOLE = 4096
"""What is moved at once is a multiple of so many elements or bytes: whole pages, of any dtype."""


@dataclass(frozen=True)
class Windows:
    """How far each movement may run ahead, in bytes of the tier that it fills.

    ``fetch_bytes``: parameters on the device that nobody has used yet; ``swap_in_bytes``: the same for
    activations; ``gradient_bytes``: gradients on the device that still wait for the d2h lane; ``swap_out_bytes``:
    activations that were swapped out and have not left yet. A single one that is larger may always be under way.
    ``chunk_elements``: the optimizer's unit of read, update and write; ``io_bytes``: one transfer of the other
    lanes; the ``*_buffers`` are counts of host staging buffers: per lane, of states, and of gradients that have left
    a GPU and wait for their states.
    """

    fetch_bytes: int
    swap_in_bytes: int
    gradient_bytes: int
    chunk_elements: int
    io_bytes: int
    io_buffers: int
    optimizer_buffers: int
    gradient_buffers: int
    swap_out_bytes: int

    def __post_init__(self) -> None:
        for name in ("fetch_bytes", "swap_in_bytes", "gradient_bytes", "swap_out_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"Windows.{name} is {getattr(self, name)}: expected zero or more bytes")
        for name in ("chunk_elements", "io_bytes"):
            value = getattr(self, name)
            if value <= 0 or value % WHOLE:
                raise ValueError(f"Windows.{name} is {value}: expected a positive multiple of {WHOLE}")
        for name, least in (("io_buffers", 1), ("optimizer_buffers", 1), ("gradient_buffers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"Windows.{name} is {getattr(self, name)}: expected at least {least}")

    @property
    def serial_optimizer(self) -> bool:
        """Whether its one buffer makes the optimizer read, update and write strictly one after the other (LoHan's naive
        handler)."""
        return self.optimizer_buffers == 1


FETCHES_BOUND = "fetches"
UPDATES_BOUND = "updates"
"""Not lanes, but they stand among them: in the forward's seconds by lane, the drives' work for what it fetches and then compute
from the last of it on; in the backward's, compute up to the first gradient and then the drives' work for updates."""
PYTHON_LANE = "python"
"""Beside a GPU: the interpreter, which the thread that launches kernels and those of the lanes have one at a time."""
BOUNDS: Mapping[str, str] = {FETCHES_BOUND: "ssd", UPDATES_BOUND: "ssd"}
"""What stands among the lanes and is none -> the lane whose work it bounds a stage by."""


@dataclass(frozen=True)
class Stage:
    """Predicted seconds of one stage per lane. The busiest lane is the bound (LoHan Eq. 4 and 5)."""

    lanes_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max(self.lanes_s.values(), default=0.0)

    @property
    def bound(self) -> str:
        """What is longest: a lane, or one of ``BOUNDS``; "none" where there is nothing."""
        return max(self.lanes_s, key=lambda lane: self.lanes_s[lane]) if self.lanes_s else "none"

    @property
    def bottleneck(self) -> str:
        """The lane that binds: the drives also where their work is longest with the compute at one end of it."""
        return BOUNDS.get(self.bound, self.bound)

    @property
    def work_s(self) -> dict[str, float]:
        """The seconds of the lanes alone."""
        return {lane: seconds for lane, seconds in self.lanes_s.items() if lane not in BOUNDS}


@dataclass(frozen=True)
class Prediction:
    """What the planner says will happen in one training step.

    ``optimizer``: what is left when the backward has ended: updates that run there, and those whose gradients come last;
    empty where there are none.
    """

    forward: Stage
    backward: Stage
    peak_bytes: Mapping[str, int]
    nvme_read_bytes: int
    nvme_write_bytes: int
    flops: int
    recompute_flops: int
    optimizer: Stage = field(default_factory=lambda: Stage({}))

    @property
    def step_s(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.optimizer.seconds

    @property
    def lanes_s(self) -> dict[str, float]:
        """Seconds of work per lane, all stages together."""
        total: dict[str, float] = {}
        for stage in (self.forward, self.backward, self.optimizer):
            for lane, seconds in stage.work_s.items():
                total[lane] = total.get(lane, 0.0) + seconds
        return total


class Use(enum.StrEnum):
    """What memory is used for."""

    STAGING = "staging buffers"
    CAPTURE = "captured graphs"
    GRAPHS = "graphs at work"
    PLACES = "places of values"
    ACTIVATIONS = "activations"
    PARAMETERS = "parameters"
    STATES = "optimizer states"
    GRADIENTS = "gradients that wait"
    FREE = "free"


@dataclass(frozen=True)
class Share:
    """``bytes`` of ``tier`` that go to ``use``. ``saves_s``: by how much longer a step would take without them."""

    tier: Tier
    use: Use
    bytes: int
    saves_s: float


@dataclass(frozen=True)
class Division:
    """How memory is divided, and how good the division is; all seconds by formula, of one step.

    ``per_byte_s``: by tier, seconds that one byte more would save, which is what the last byte of each use saves.
    ``walk_s``: the best by Algorithm 1; ``bound_s``: no decisions are faster.
    """

    shares: tuple[Share, ...]
    per_byte_s: Mapping[str, float]
    step_s: float
    walk_s: float
    bound_s: float

    def bytes_of(self, tier: Tier, use: Use) -> int:
        """What ``use`` has of ``tier``."""
        return sum(share.bytes for share in self.shares if share.tier is tier and share.use is use)


@dataclass(frozen=True)
class Plan:
    """All decisions for one model at one input shape under one set of budgets, with the prediction.

    ``forwards``: how many of them wait for their backwards at once, each of which keeps its activations (docs/0047).
    ``outputs_bytes``: what a call returns, in bytes. ``loss_only``: False where the caller may hold all of that until after the
    next call, and the graphs' peak counts it (docs/0056).
    """

    policy: str
    device: str
    compute_dtype: str
    host_memory_bytes: int
    device_memory_bytes: int
    activations: tuple[ActivationPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    windows: Windows
    prediction: Prediction | None = None
    notes: tuple[str, ...] = field(default=())
    division: Division | None = None
    forwards: int = 1
    outputs_bytes: int = 0
    loss_only: bool = True

    def __post_init__(self) -> None:
        if self.forwards < 1:
            raise ValueError(f"Plan.forwards is {self.forwards}: at least one waits for its backward")

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations that stay on the device until a backward has used them."""
        return self.bytes_of(Keep())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the device's memory that the other ``forwards`` keep, with what they have returned: it may be what their
        backwards recompute from, whoever else holds it."""
        return (self.forwards - 1) * (self.kept_bytes + self.outputs_bytes)

    def decision(self, node: str) -> Decision | None:
        """The decision for the forward value ``node``, or None where the plan does not speak of it."""
        found = self._by_node.get(node)
        return found.decision if found else None

    def parameter(self, name: str) -> ParameterPlan:
        """The plan of parameter ``name``; ``KeyError`` names it where there is none."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(f"the plan has no parameter {name!r}")

    def with_decisions(self, decisions: Mapping[str, Decision]) -> Plan:
        """A copy with other decisions for the named activations, without prediction and division."""
        unknown = sorted(set(decisions) - set(self._by_node))
        if unknown:
            raise ValueError(f"the plan has no activation {', '.join(unknown)}: known ones are in plan.activations")
        for name, decision in decisions.items():
            if isinstance(decision, Recompute) and self._by_node[name].mandatory:
                raise ValueError(f"activation {name} must be saved (recomputation starts from it): Keep or Swap it")
        activations = tuple(
            dataclasses.replace(a, decision=decisions.get(a.node, a.decision)) for a in self.activations
        )
        return dataclasses.replace(self, activations=activations, prediction=None, division=None)

    def with_homes(self, home: Tier, states_home: Tier) -> Plan:
        """A copy with every parameter at ``home`` and all optimizer states at ``states_home``."""
        parameters = tuple(
            dataclasses.replace(p, home=home, states_home=states_home if p.trainable else None, updated_twice=False)
            for p in self.parameters
        )
        return dataclasses.replace(self, parameters=parameters, prediction=None, division=None)

    def bytes_of(self, decision: Decision) -> int:
        """Bytes of the activations with this decision."""
        return self._bytes_of.get(decision, 0)

    @functools.cached_property
    def _bytes_of(self) -> dict[Decision, int]:
        found: dict[Decision, int] = {}
        for activation in self.activations:
            found[activation.decision] = found.get(activation.decision, 0) + activation.bytes
        return found

    @functools.cached_property
    def _by_node(self) -> dict[str, ActivationPlan]:
        return {a.node: a for a in self.activations}

    def to_json(self) -> str:
        """The plan as readable JSON; decisions and tiers are words, bytes and seconds plain numbers, or null for ever."""
        raw = dataclasses.asdict(self)
        raw |= {name: _without_infinity(raw[name]) for name in ("prediction", "division")}
        raw["activations"] = [{**dataclasses.asdict(a), "decision": str(a.decision)} for a in self.activations]
        return json.dumps({"format": FORMAT, **raw}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote. Raises ``ValueError`` naming what is missing or of another format."""
        raw: dict[str, Any] = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError(f"this is not a plan: expected a JSON object, found {type(raw).__name__}")
        if raw.pop("format", None) != FORMAT:
            raise ValueError(f"this plan is not of format {FORMAT}: make it again with this version of lohan_fx")
        try:
            raw["activations"] = tuple(
                _checked(ActivationPlan(**{**a, "decision": parse_decision(a["decision"])})) for a in raw["activations"]
            )
            raw["parameters"] = tuple(_parameter(p) for p in raw["parameters"])
            raw["windows"] = _checked(Windows(**raw["windows"]))
            raw["notes"] = tuple(raw["notes"])
            if raw["prediction"] is not None:
                names = ("forward", "backward", "optimizer")
                stages = {name: _checked(Stage(**_endless(raw["prediction"][name]))) for name in names}
                raw["prediction"] = _checked(Prediction(**{**raw["prediction"], **stages}))
            if raw["division"] is not None:
                shares = tuple(
                    _checked(Share(**{**_endless(share), "tier": Tier(share["tier"]), "use": Use(share["use"])}))
                    for share in raw["division"]["shares"]
                )
                raw["division"] = _checked(Division(**{**_endless(raw["division"]), "shares": shares}))
            return _checked(cls(**raw))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a plan: {error}") from error


def _parameter(raw: Mapping[str, Any]) -> ParameterPlan:
    states_home, gradient_home = raw["states_home"], raw["gradient_home"]
    return _checked(
        ParameterPlan(
            **{
                **raw,
                "home": Tier(raw["home"]),
                "states_home": None if states_home is None else Tier(states_home),
                "gradient_home": None if gradient_home is None else Tier(gradient_home),
                "optimizer_runs": OptimizerTiming(raw["optimizer_runs"]),
            }
        )
    )


def _without_infinity(value: Any) -> Any:
    """``value`` with null for infinite seconds, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_infinity(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return None if value == math.inf else value


def _endless(raw: Any) -> dict[str, Any]:
    """``raw`` with its seconds as they were before ``_without_infinity``."""
    found = dict(raw)
    for name in ("saves_s", "step_s", "walk_s", "bound_s"):
        if found.get(name, 0.0) is None:
            found[name] = math.inf
    for name in ("lanes_s", "per_byte_s"):
        if isinstance(found.get(name), dict):
            found[name] = {key: math.inf if seconds is None else seconds for key, seconds in found[name].items()}
    return found


_Part = TypeVar("_Part", ActivationPlan, ParameterPlan, Windows, Stage, Prediction, Share, Division, Plan)


def _checked(part: _Part) -> _Part:
    """``part``, whose counts are whole numbers from 0 on, seconds numbers and names text, also of what it has by name; else
    ``TypeError`` says which is not."""
    for item in dataclasses.fields(part):
        value, kind = getattr(part, item.name), _KINDS.get(str(item.type))
        if kind is not None and not kind[0](value):
            raise TypeError(f"{type(part).__name__}.{item.name} is {value!r}: expected {kind[1]}")
    return part


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _by_name(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_one(each) for each in value.values())


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_count, "a whole number, 0 or more"),
    "float": (_is_number, "a number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "Mapping[str, int]": (lambda value: _by_name(value, _is_count), "names with whole numbers, 0 or more"),
    "Mapping[str, float]": (lambda value: _by_name(value, _is_number), "names with numbers"),
}
"""Of a field's type: whether it may have a value, and what it may."""
