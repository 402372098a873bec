"""module_calls: what Dynamo captures of a model: the calls of its modules, with gradients and without, each by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import FailOnRecompileLimitHit

Key = tuple[nn.Module, bool]
"""A module, and whether its call trains."""
Call = Callable[..., Any]

_numbers = itertools.count()


class ModuleCalls:
    """One call per key, captured anew for inputs that its graphs do not hold for. ``backend`` makes the ``torch.compile``
    backend of a module. ``dynamic``: as ``torch.compile`` takes it, for what trains; evaluation is for many sizes from its second
    shape on."""

    def __init__(self, backend: Callable[[nn.Module], Any], dynamic: bool | None) -> None:
        self._backend = backend
        self._dynamic = dynamic
        self._calls: dict[Key, Call] = {}
        self._captured: set[Key] = set()
        self._each_shape: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._calls

    def __getitem__(self, key: Key) -> Call:
        if key not in self._calls:
            self._calls[key] = self._new(key[0], self._wanted(key))
        return self._calls[key]

    def for_each_shape(self, key: Key) -> Call:
        """Another call, which is captured for one shape at a time: ``settle`` puts it in the place of the present one."""
        return self._new(key[0], False)

    def was_for_many(self, key: Key, why: Exception) -> bool:
        """Whether what failed for ``why`` as it was traced was to hold for many sizes, so that it may be traced for its own."""
        if key in self._each_shape or isinstance(why.__cause__, FailOnRecompileLimitHit):
            return False
        wanted = self._wanted(key)
        return wanted is True or (wanted is None and key in self._captured)

    def settle(self, key: Key, call: Call) -> bool:
        """``call`` was captured, and is the one for ``key``; whether another one was before."""
        self._captured.add(key)
        before, self._calls[key] = self._calls[key], call
        if before is call:
            return False
        self._each_shape.add(key)
        _forget(before)
        return True

    def forget(self, *, training: bool = False, but: Call | None = None) -> None:
        """The graphs of all calls, or of those that train, go; of all ``but`` one. They are captured again when called."""
        for (_, trains), call in self._calls.items():
            if (trains or not training) and call is not but:
                _forget(call)

    def _wanted(self, key: Key) -> bool | None:
        return self._dynamic if key[1] else None

    def _new(self, module: nn.Module, dynamic: bool | None) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # Dynamo keeps its graphs with the code object, and with its name which sizes have changed: with one of its own, graphs go
        # when the model does, and what one call has seen says nothing of another.
        call.__code__ = call.__code__.replace(co_name=f"{call.__name__}_{next(_numbers)}")
        made: Call = torch.compile(call, backend=self._backend(module), fullgraph=True, dynamic=dynamic)
        return made


def _forget(call: Call) -> None:
    reset_code(call._torchdynamo_orig_callable.__code__)  # type: ignore[attr-defined]
