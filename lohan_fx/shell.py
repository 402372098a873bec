"""Shell: what an offloaded ``nn.Parameter`` leaves behind in the model.

A shell keeps shape, dtype, device and identity over a storage of no bytes. Inside the compiled model it is only an
argument of ``lohan::fetch``. Anywhere else a read or an in-place edit raises ``OffloadedParameterError``: on a bare
tensor without storage, PyTorch would crash the process or save an empty file.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Never, Protocol

import torch

from lohan_fx.errors import OffloadedParameterError


class ShellOwner(Protocol):
    """The compiled model that a shell belongs to."""

    def read_parameter(self, slot: int) -> torch.Tensor: ...
    def write_parameter(self, slot: int, value: torch.Tensor) -> None: ...
    def holds_gradients(self) -> bool: ...


# Inside `state_dict()` and `load_state_dict()` of a compiled model `detach` reads and `copy_` writes the store.
_streaming: contextvars.ContextVar[bool] = contextvars.ContextVar("lohan_streaming", default=False)

_PROPERTIES = (
    "shape dtype device layout requires_grad is_leaf grad_fn ndim names itemsize nbytes is_cuda is_cpu is_meta is_mps "
    "is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_xpu is_xla is_mtia is_ipu is_vulkan is_maia "
    "output_nr retains_grad _version _backward_hooks _grad_fn volatile name"
).split()

_METADATA = frozenset(
    getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(getattr(torch.Tensor, name, None), "__get__")
)

_METHODS = frozenset(
    "size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex is_contiguous "
    "requires_grad_ untyped_storage __hash__ __len__ type_as_shape is_signed is_same_size get_device "
    "register_post_accumulate_grad_hook register_hook has_names is_shared _is_view is_inference is_conj is_neg "
    "is_non_overlapping_and_dense data_ptr _typed_storage retain_grad backward".split()
)

Metadata = Callable[..., Any]


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
        name = getattr(func, "__name__", str(func))
        if name == "__set__" or (name == "detach" and _streaming.get()) or (name == "copy_" and _streaming.get()):
            return _special(func, name, args)
        if func in _METADATA or name in _METHODS or getattr(func, "namespace", "") == "lohan" or _tracing():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _refuse(_describe(func, name), *args, **(kwargs or {}))

    @property  # type: ignore[override]
    def grad(self) -> None:
        """None, as long as no gradient is under way; reading one raises, because it is not in memory."""
        owner = getattr(self, "owner", None)
        if owner is not None and owner.holds_gradients() and not _tracing():
            raise OffloadedParameterError(
                f"the gradient of {self.parameter_name} is not in memory: it went to the optimizer by itself. Gradient "
                "clipping (torch.nn.utils.clip_grad_norm_) is not supported yet, and an optimizer of torch.optim cannot "
                "update offloaded parameters: use lohan_fx.AdamW(model.parameters(), ...)"
            )
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise OffloadedParameterError(
                f"the gradient of {self.parameter_name} cannot be set: it lives with the optimizer, not in memory"
            )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        del tensor_contents
        name = getattr(self, "parameter_name", "?")
        return f"Shell({name}, shape={tuple(self.shape)}, dtype={self.dtype}, offloaded)"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

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
    shell.owner = None
    return shell


@contextlib.contextmanager
def streaming() -> Iterator[None]:
    """Within: ``shell.detach()`` reads the parameter from the store, ``shell.copy_(value)`` writes it."""
    token = _streaming.set(True)
    try:
        yield
    finally:
        _streaming.reset(token)


def _tracing() -> bool:
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def _special(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    shell = args[0]
    if name == "__set__":
        if func == torch.Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        _refuse("assigning to an attribute", shell)
    if not isinstance(shell, Shell) or shell.owner is None:
        _refuse(name, *args)
    if name == "detach":
        return shell.owner.read_parameter(shell.slot)
    shell.owner.write_parameter(shell.slot, args[1])
    return shell


def _describe(func: Callable[..., Any], name: str) -> str:
    if name == "__get__":
        return f".{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}"
    return name


def _refuse(what: str, *args: Any, **kwargs: Any) -> Never:
    shells = [a for a in _flat([*args, *kwargs.values()]) if isinstance(a, Shell)]
    names = ", ".join(getattr(s, "parameter_name", "?") for s in shells[:3]) or "a parameter"
    raise OffloadedParameterError(
        f"{what} was called on {names}, which is offloaded: its values are on NVMe, not in memory. Call the model "
        "itself to use it, model.state_dict() to read it, model.load_state_dict() to change it, or "
        "lohan_fx.release(model) to get ordinary parameters back"
    )


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(list(value))
        else:
            yield value
