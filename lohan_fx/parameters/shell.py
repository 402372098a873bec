"""Shell: what an offloaded ``nn.Parameter`` leaves behind in the model.

A shell keeps shape, dtype, device and identity over a storage of no bytes. Inside the compiled model it is only an
argument of ``lohan::fetch``. Anywhere else a read or an in-place edit raises ``OffloadedParameterError``: on a bare
tensor without storage, PyTorch would crash the process or save an empty file.

Two of PyTorch's entrances look past every subclass and still crash: ``torch.tensor(parameter)``, and a transform of
``torch.func`` (``vmap``, ``grad``) over a parameter. Call ``model.state_dict()`` for values to work on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Never, Protocol

import torch

from lohan_fx.errors import OffloadedParameterError
from lohan_fx.parameters.held_gradient import HeldGradient


class ShellOwner(Protocol):
    """The compiled model that a shell belongs to."""

    def read_parameter(self, slot: int) -> torch.Tensor: ...
    def write_parameter(self, slot: int, value: torch.Tensor) -> None: ...
    def has_states(self, slot: int) -> bool: ...
    def gradient(self, shell: Shell) -> torch.Tensor | None: ...
    def drop_gradient(self, slot: int) -> None: ...
    def drops_gradients(self, slot: int) -> bool: ...


# Inside `state_dict()` and `load_state_dict()` of a compiled model `detach` reads and `copy_` writes the store.
_streaming: contextvars.ContextVar[bool] = contextvars.ContextVar("lohan_streaming", default=False)

# Inside `module.to(...)`, which changes nothing of a shell, nor of the gradient that is held for it or applied already.
_moving: contextvars.ContextVar[bool] = contextvars.ContextVar("lohan_moving", default=False)

# Whether what Dynamo traces is a compiled model of ours. A plain global, because Dynamo must read it.
_capturing = False
_callers = 0
_lock = threading.Lock()

# Nothing here tells of a parameter's values. A version of torch that lacks one does without.
_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad_fn _grad_fn output_nr retains_grad grad_dtype "
    "name is_cpu is_cuda is_meta is_mps is_xpu is_xla is_mtia is_ipu is_maia is_vulkan is_mkldnn is_nested is_quantized "
    "is_sparse is_sparse_csr _version _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim ndimension numel nelement stride storage_offset element_size get_device dim_order is_floating_point is_complex "
    "is_signed is_conj is_neg is_inference is_contiguous is_same_size retain_grad _is_view _has_compatible_shallow_copy_type "
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty "
    "__len__ __hash__ __dir__"
)
_METADATA = frozenset(
    getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)
) | frozenset(
    getattr(owner, name) for owner in (torch.Tensor, torch) for name in _METHODS.split() if hasattr(owner, name)
)
_ALLOWED = _METADATA | {torch.autograd.backward}
"""A backward may name parameters as its inputs."""
_IN_PYTHON = (
    "__rsub__ __rdiv__ __rtruediv__ pow __rpow__ __floordiv__ __rfloordiv__ __rmod__ __rmatmul__ __reversed__ "
    "rms_norm pad linear_cross_entropy lp_pool3d triplet_margin_with_distance_loss"
)
_INLINED = frozenset(_IN_PYTHON.split())
"""Functions and operators that PyTorch has in Python and whose Python Dynamo traces; ``pow`` is the name of ``__pow__``."""
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ["to", "cpu", "cuda", "float", "double", "half", "bfloat16"]
)
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that ``torch.Tensor`` has in Python, so that Dynamo traces it: it does not find those that are inherited."""

    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return method(self.view_as(self) if _tracing() else self, *args, **kwargs)

    return call


class Shell(torch.nn.Parameter):
    """An offloaded parameter. ``slot`` is its place in the runtime, ``parameter_name`` its name in the model."""

    slot: int
    parameter_name: str
    owner: ShellOwner | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Dynamo reads this function too, and must not meet what it cannot trace; hence the order.
        if torch.compiler.is_dynamo_compiling() and not _capturing:
            torch._dynamo.graph_break("a model compiled by lohan_fx runs in its own graph")
        if _tracing():
            with torch._C.DisableTorchFunctionSubclass():
                if isinstance(func, FunctionType) and func.__name__ in _INLINED:
                    # These ask again whether they are overridden, and Dynamo says yes also in here.
                    args = tuple([arg.view_as(arg) if isinstance(arg, Shell) else arg for arg in args])
                    kwargs = {name: arg.view_as(arg) if isinstance(arg, Shell) else arg for name, arg in kwargs.items()}
                return func(*args, **kwargs)
        if func in _ALLOWED or getattr(func, "namespace", "") == "lohan":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _outside(func, args, kwargs)

    @property
    def grad(self) -> torch.Tensor | None:
        """None, as long as no gradient is held for it; else what stands for it (``held_gradient``)."""
        owner = getattr(self, "owner", None)
        return None if owner is None or _moving.get() or _tracing() else owner.gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if isinstance(value, HeldGradient) and value.slot == self.slot:
            return  # the end of ``parameter.grad *= 0.5``
        if value is None:
            if (owner := getattr(self, "owner", None)) is not None:
                owner.drop_gradient(self.slot)
        else:
            raise OffloadedParameterError(
                f"the gradient of {self.parameter_name} cannot be set: it lives with the optimizer, not in memory"
            )

    norm = _traceable(torch.Tensor.norm)
    split = _traceable(torch.Tensor.split)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        name = getattr(self, "parameter_name", "?")
        return f"Shell({name}, shape={tuple(self.shape)}, dtype={self.dtype}, offloaded)"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def set_(self, *args: Any, **kwargs: Any) -> Never:
        """Refused here, because PyTorch does not ask ``__torch_function__`` about it."""
        _refuse("set_", self, *args, **kwargs)

    def __deepcopy__(self, memo: object) -> Never:
        del memo
        _refuse("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: object) -> Never:
        del protocol
        _refuse("pickling (torch.save of the model)", self)


def make_shell(like: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> Shell:
    """A shell of the shape of ``like``; its storage holds no bytes."""
    with torch.no_grad():
        empty = torch.empty(like.shape, dtype=dtype, device=device)
        shell: Shell = torch.Tensor._make_subclass(Shell, empty, like.requires_grad)
        del empty
        with torch._C.DisableTorchFunctionSubclass():
            shell.untyped_storage().resize_(0)
        # For what asks for the address without asking this class, such as DLPack.
        torch._C._set_throw_on_mutable_data_ptr(shell)
    shell.owner = None
    return shell


@contextlib.contextmanager
def streaming() -> Iterator[None]:
    """Within: ``shell.detach()`` reads the parameter from the store, ``shell.copy_(value)`` writes it."""
    with _within(_streaming):
        yield


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Within: shells say nothing of their gradients."""
    with _within(_moving):
        yield


@contextlib.contextmanager
def _within(what: contextvars.ContextVar[bool]) -> Iterator[None]:
    token = what.set(True)
    try:
        yield
    finally:
        what.reset(token)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around the call of a compiled model: what Dynamo traces within is its graph, not somebody else's. Any thread."""
    global _capturing, _callers
    with _lock:
        _callers, _capturing = _callers + 1, True
    try:
        yield
    finally:
        with _lock:
            _callers -= 1
            _capturing = _callers > 0


def captures() -> bool:
    """Whether Dynamo traces the caller for a graph of ours."""
    return _tracing() and _capturing


def _tracing() -> bool:
    """Whether this thread traces: ``torch.compiler.is_compiling`` is also true while another one does."""
    return torch.compiler.is_dynamo_compiling() or torch._guards.TracingContext.try_get() is not None


def _outside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call on a shell outside the compiled model that is more than a look at its metadata."""
    shell = args[0] if args else None
    if isinstance(shell, Shell) and shell.owner is not None:
        if func in _CONVERSIONS and _changes_nothing(func, shell, args[1:], kwargs):
            return shell
        if func == _SET_DATA and args[1] is shell:  # the end of module.to(...) that changes nothing
            return None
        if func in (_SET_REQUIRES_GRAD, torch.Tensor.requires_grad_):
            return _set_requires_grad(shell, *args[1:], **kwargs)
        if _streaming.get() and func is torch.Tensor.detach:
            return shell.owner.read_parameter(shell.slot)
        if _streaming.get() and func is torch.Tensor.copy_:
            shell.owner.write_parameter(shell.slot, args[1])
            torch.autograd.graph.increment_version(shell)
            return shell
    _refuse(_describe(func), *args, **kwargs)


def _changes_nothing(func: Callable[..., Any], shell: Shell, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversion would return the tensor itself: PyTorch says, asked with an empty one of the same kind."""
    like = torch.empty((0,) * shell.dim(), dtype=shell.dtype, device=shell.device)
    return "memory_format" not in kwargs and func(like, *args, **kwargs) is like


def _set_requires_grad(shell: Shell, requires_grad: bool = True) -> Shell:
    if requires_grad and shell.owner is not None and not shell.owner.has_states(shell.slot):
        raise ValueError(
            f"{shell.parameter_name} was frozen when the model was compiled, so it has no optimizer states: "
            "lohan_fx.release(model), set requires_grad, and compile again"
        )
    with torch._C.DisableTorchFunctionSubclass():
        shell.requires_grad_(requires_grad)
    return shell


def _describe(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "an attribute")
    return {"__get__": f".{attribute}", "__set__": f"assigning to .{attribute}"}.get(name, name)


def _refuse(what: str, *args: Any, **kwargs: Any) -> Never:
    shells = [a for a in _flat([*args, *kwargs.values()]) if isinstance(a, Shell)]
    names = ", ".join(getattr(s, "parameter_name", "?") for s in shells[:3]) or "a parameter"
    if shells and all(s.owner is None for s in shells):
        raise OffloadedParameterError(
            f"{what} was called on {names}, which went with its model: that was released, and has other parameters now, or was "
            "ended by lohan_fx.reset() or an interrupt, and must be built again"
        )
    if what in _HOOKS:
        raise OffloadedParameterError(
            f"{what} was called on {names}, which is offloaded: the gradient of {names} goes to the optimizer, past all "
            f"hooks. Compiled with hold_gradients=True, lohan_fx.grad(model, {names!r}) reads it between backward and "
            "optimizer.step(), parameter.grad *= factor scales it, and lohan_fx.clip_grad_norm_ clips it"
        )
    raise OffloadedParameterError(
        f"{what} was called on {names}, which is offloaded: its values are on NVMe, not in memory. Call the model, "
        "or the module that has it, to use it, model.state_dict() to read it, model.load_state_dict() to change it, or "
        "lohan_fx.release(model) to get ordinary parameters back"
    )


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(list(value))
        else:
            yield value
