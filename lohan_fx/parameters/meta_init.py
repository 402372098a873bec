"""meta_init: the values of a model that was built under ``torch.device("meta")``, one module after the other.

Each module's parameters and buffers on ``meta`` are made on the CPU, set as the model itself would, handed over and
dropped before the next one's. The numbers come from torch's generator in the order of plain construction, as far as a
finished model tells: a module's children, then its own ``reset_parameters()``, then, around it, ``_init_weights(module)``
of a model of Hugging Face's kind for all that is in it. These are the very numbers of plain construction where
constructors draw by ``reset_parameters`` alone and in the order of registration, as in Llama; a class that draws in its
own ``__init__`` (GPT-2's Conv1D) shifts what follows, and the model is another sample of the same distribution. A tied
parameter is set where it comes first.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lohan_fx import process_memory
from lohan_fx.errors import InfeasiblePlan

Initialize = Callable[[nn.Module], None]
Store = Callable[[nn.Parameter, torch.Tensor], None]
"""``store(parameter on meta, its value)``."""
Buffers = dict[tuple[nn.Module, str], torch.Tensor]

_LOOKED_AT = 1 << 20
"""Elements at a time: what is found of them takes memory, too."""
_RESETS = ("reset_parameters", "_reset_parameters")
_REMEDY = (
    "build the model in lohan_fx.build_on_disk(folder), which needs no more memory and gives the numbers of the CPU, or "
    "pass initialize=function of a module"
)
_NOT_SAVED = f"neither weights nor checkpoints hold it, since it is registered with persistent=False: {_REMEDY}"


@dataclass(eq=False)
class _Draw:
    """One call on ``module`` that sets numbers of ``reach``; ``state``: of the generator before it."""

    module: nn.Module
    way: Callable[..., object]
    reach: list[nn.Module] = field(default_factory=list)
    is_reset: bool = False
    state: torch.Tensor | None = None

    def execute(self) -> None:
        if self.is_reset:
            self.way()
        else:
            self.way(self.module)

    def execute_again(self) -> None:
        """As the first time, and the generator stays as it is."""
        assert self.state is not None
        now = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            self.execute()
        finally:
            torch.set_rng_state(now)


@dataclass(frozen=True, eq=False)
class _Place:
    """``value``, made on the CPU in place of ``meta``; ``version``: of the value while nobody has set it."""

    meta: torch.Tensor
    value: torch.Tensor
    version: int


def has_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of ``model`` is on ``meta``."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


@dataclass(frozen=True, eq=False)
class _Turn:
    """``draw``, what is drawn ``again`` before it, and the modules that are ``finished`` by it. All that they reach is in memory
    together."""

    draw: _Draw
    again: list[_Draw]
    finished: list[nn.Module]

    @property
    def reach(self) -> list[nn.Module]:
        return list(dict.fromkeys(module for draw in (*self.again, self.draw) for module in draw.reach))

    def execute(self) -> None:
        for earlier in self.again:
            earlier.execute_again()
        self.draw.execute()


def initialized(
    model: nn.Module,
    initialize: Initialize | None,
    store: Store,
    *,
    parameters: bool = True,
    skip: frozenset[str] = frozenset(),
    most_bytes: float = math.inf,
) -> Buffers:
    """Set all parameters on ``meta`` by handing their values to ``store``; the values of the buffers on ``meta``.

    ``initialize(module)`` sets the parameters and buffers of that module alone; None: the model's own ways.
    ``parameters`` False: only what has buffers, which is all that is kept. ``skip``: buffers that come from elsewhere.
    The model is unchanged: what is returned is for the caller to put in place.

    Raises ``ValueError`` where a module does not say how, or leaves a number unset, and ``InfeasiblePlan``, before anything is
    made, where what must be in memory together takes more than ``most_bytes``.
    """
    names = {module: name for name, module in model.named_modules()}
    remedy = f"{_REMEDY}, or weights=file" if parameters else _NOT_SAVED
    turns = _turns(model, initialize, names, remedy, parameters=parameters, skip=skip)
    _check_room(turns, names, most_bytes)
    buffers: Buffers = {}
    first: dict[int, tuple[nn.Module, str]] = {}
    for module in (module for turn in turns for module in turn.draw.reach):
        for name, parameter in module._parameters.items():
            first.setdefault(id(parameter), (module, name))

    def take(turn: _Turn) -> None:
        """Nothing of what is made in here is left after it, so that the next one's is all there is."""
        # The heap would keep what earlier modules had, stored or not, and grow to the size of the model.
        process_memory.return_free_memory()
        with _made(turn.reach) as made, torch.no_grad():
            turn.execute()
            for (module, kind, name), place in made.items():
                full = _full(names[module], name)
                if module not in turn.finished or full in skip:
                    continue
                _check_set(place, full, remedy)
                if kind == "buffer":
                    buffers[module, name] = place.value
                elif parameters and first[id(place.meta)] == (module, name):
                    assert isinstance(place.meta, nn.Parameter)
                    store(place.meta, place.value)

    for turn in turns:
        turn.draw.state = torch.get_rng_state()
        take(turn)
    return buffers


def _turns(
    model: nn.Module,
    initialize: Initialize | None,
    names: Mapping[nn.Module, str],
    remedy: str,
    *,
    parameters: bool,
    skip: frozenset[str],
) -> list[_Turn]:
    """Every draw that sets what is wanted, in the order of construction."""
    own = {m: _own(m, parameters=parameters, skip=skip, prefix=names[m]) for m in model.modules()}
    wanted = {module for module, found in own.items() if found}
    if initialize is not None:
        draws = [_Draw(module, initialize, [module]) for module in model.modules() if module in wanted]
    else:
        draws = [draw for draw in _construction(model) if _find_reach(draw, wanted, remedy)]
    lost = wanted - {module for draw in draws for module in draw.reach}
    _check_all_set({module: own[module][0] for module in lost}, remedy)
    touching: dict[nn.Module, list[_Draw]] = {}
    for draw in draws:
        for module in draw.reach:
            touching.setdefault(module, []).append(draw)
    turns = []
    for place, draw in enumerate(draws):
        finished = [module for module in draw.reach if touching[module][-1] is draw]
        # What is drawn before a module's last draw only moves the generator: it is drawn again then.
        again = [earlier for earlier in draws[:place] if any(earlier in touching[module] for module in finished)]
        turns.append(_Turn(draw, again, finished))
    return turns


def _check_room(turns: Iterable[_Turn], names: Mapping[nn.Module, str], most_bytes: float) -> None:
    for turn in turns:
        needed = sum(t.nbytes for module in turn.reach for t in _tensors(module) if t.is_meta)
        if needed > most_bytes:
            largest = max(turn.reach, key=lambda module: sum(t.nbytes for t in _tensors(module)))
            raise InfeasiblePlan(
                f"initialising {names[largest] or 'the model'} (a {type(largest).__name__}), which is on the meta device, takes "
                f"{needed:,} bytes at once, and host_memory leaves {max(0, int(most_bytes)):,}: allow "
                f"{math.ceil(needed - most_bytes):,} bytes more, pass weights=file, which is read in pieces, or build the model "
                "in lohan_fx.build_on_disk(folder)"
            )


def _find_reach(draw: _Draw, wanted: Collection[nn.Module], remedy: str) -> bool:
    """Find which of ``wanted`` the draw sets, in it or below it (GPT-2's blocks set weights of their parts), by executing
    it on ``meta``, where nothing is drawn; whether it sets any."""
    own = [draw.module] if draw.module in wanted else []
    if own and not all(t.is_meta for t in _tensors(draw.module)):
        raise ValueError(
            f"a {type(draw.module).__name__} is on the meta device in part, and setting it would overwrite the rest: {remedy}"
        )
    if not all(t.is_meta for t in (*draw.module.parameters(), *draw.module.buffers())):
        draw.reach = own
        return bool(own)
    below = [m for m in draw.module.modules() if m in wanted and m not in own]
    # Each place has a tensor of its own meanwhile: of those that are tied, only the one by which it is set counts.
    with _made(below, torch.empty_like) as made:
        # What looks into numbers cannot be executed on ``meta``; it is taken to set its own.
        with torch.no_grad(), contextlib.suppress(NotImplementedError, RuntimeError):
            draw.execute()
        found = dict.fromkeys(m for (m, *_), place in made.items() if place.value._version != place.version)
    draw.reach = [*own, *found]
    return bool(draw.reach)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _own(module: nn.Module, *, parameters: bool, skip: frozenset[str], prefix: str) -> list[str]:
    """The names of what ``module`` itself holds on ``meta`` and is to be set."""
    held = module._parameters.items() if parameters else ()
    found = [_full(prefix, name) for name, parameter in held if parameter is not None and parameter.is_meta]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and _full(prefix, name) not in skip:
            found.append(_full(prefix, name))
    return found


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _construction(model: nn.Module) -> Iterator[_Draw]:
    """What sets the numbers of each module, in the order in which its constructors do."""
    owners: dict[nn.Module, Initialize | None] = {}
    constructed: set[nn.Module] = set()
    finished: set[nn.Module] = set()

    def own(module: nn.Module, owner: Initialize | None) -> None:
        owners.setdefault(module, getattr(module, "_init_weights", None) or owner)
        for child in module.children():
            own(child, owners[module])

    def construct(module: nn.Module) -> Iterator[_Draw]:
        if module in constructed:
            return
        constructed.add(module)
        for child in module.children():
            yield from construct(child)
        resets = [getattr(module, name) for name in _RESETS if callable(getattr(module, name, None))]
        yield from (_Draw(module, reset, is_reset=True) for reset in resets[:1])
        if callable(getattr(module, "_init_weights", None)):
            yield from finish(module)

    def finish(module: nn.Module) -> Iterator[_Draw]:
        if module in finished:
            return
        finished.add(module)
        for child in module.children():
            yield from finish(child)
        owner = owners[module]
        if owner is not None:
            yield _Draw(module, owner)

    own(model, None)
    yield from construct(model)


def _check_all_set(lost: Mapping[nn.Module, str], remedy: str) -> None:
    """``lost``: modules that nothing sets, each with the name of what it holds on ``meta``."""
    if lost:
        module, name = min(lost.items(), key=lambda item: item[1])
        raise ValueError(
            f"{name} (of a {type(module).__name__}) is on the meta device, and its module has neither reset_parameters() nor a "
            f"model around it with _init_weights(module): {remedy}"
        )


@contextlib.contextmanager
def _made(
    modules: Collection[nn.Module], make: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[dict[tuple[nn.Module, str, str], _Place]]:
    """Within: what ``modules`` themselves have on ``meta`` is what ``make`` makes of it (None: the same on the CPU, unset), by
    module, kind and name."""
    made: dict[tuple[nn.Module, str, str], _Place] = {}

    def held(module: nn.Module, kind: str) -> dict[str, Any]:
        return module._parameters if kind == "parameter" else module._buffers

    try:
        for module, kind in itertools.product(modules, ("parameter", "buffer")):
            for name, meta in list(held(module, kind).items()):
                if meta is not None and meta.is_meta:
                    value = (make or _unset)(meta)
                    if kind == "parameter":
                        value = nn.Parameter(value, requires_grad=meta.requires_grad)
                    made[module, kind, name] = _Place(meta, value, value._version)
                    held(module, kind)[name] = value
        yield made
    finally:
        for (module, kind, name), place in made.items():
            held(module, kind)[name] = place.meta


def _unset(meta: torch.Tensor) -> torch.Tensor:
    """Memory for ``meta`` on the CPU, of numbers that no initialisation sets; zeros of a bool or uint8, which has none."""
    value = torch.empty(meta.shape, dtype=meta.dtype)
    return value.fill_(_nothing(meta.dtype)) if meta.dtype is not torch.bool else value.zero_()


def _nothing(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _check_set(place: _Place, name: str, remedy: str) -> None:
    value = place.value
    if not value.numel():
        return
    pieces = value.detach().reshape(-1).split(_LOOKED_AT)
    if value.dtype in (torch.bool, torch.uint8):
        # The version tells zeros that were set from those that were there; what is set through ``.data`` leaves it.
        unset = value.numel() if value._version == place.version and not any(bool(p.any()) for p in pieces) else 0
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        unset = sum(int(piece.isnan().sum()) for piece in pieces)
    else:
        unset = value.numel() if all(bool((piece == _nothing(value.dtype)).all()) for piece in pieces) else 0
    if unset:
        raise ValueError(
            f"{name} is on the meta device, and its module's initialisation leaves {unset:,} of its {value.numel():,} "
            f"numbers unset: {remedy}"
        )
