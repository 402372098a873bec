"""compile_arguments: what ``compile`` may be asked for, and the words by which it refuses the rest."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lohan_fx.compiled_model import ATTRIBUTE
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.parameters.build_on_disk import is_building
from lohan_fx.parameters.meta_init import Initialize
from lohan_fx.parameters.shell import Shell
from lohan_fx.plan import Plan
from lohan_fx.planning.problem import ParameterFacts
from lohan_fx.policies import runnable
from lohan_fx.policies.lohan import LOHAN

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_arguments(
    model: nn.Module,
    hw: HardwareProfile,
    compute_dtype: torch.dtype,
    policy: str,
    plan: Plan | None,
    initialize: Initialize | None,
    forwards: int,
    loss_only: bool,
    dynamic: bool | None,
    revise: bool,
    hold_gradients: bool | None,
) -> None:
    """Raises ``ValueError`` or ``TypeError`` for what is not a model, a machine or a wish that can be met."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile() takes a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(hw, HardwareProfile):
        raise TypeError(
            f"hw is a {type(hw).__name__}: expected HardwareProfile.measure(...), .load(...) or .preset(...)"
        )
    if hw.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the hardware profile {hw.name!r} is of a CUDA device, and this process sees none")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "compile() was called within torch.inference_mode(), whose tensors autograd refuses: call it outside"
        )
    if is_building():
        raise ValueError(
            "compile() was called within build_on_disk(), which would put all it makes into files: call it after that block"
        )
    if any(hasattr(module, ATTRIBUTE) for module in model.modules()):
        raise ValueError("this model (or a part of it) is compiled already: lohan_fx.release(model) first")
    runnable(policy)
    if compute_dtype not in _DTYPES:
        raise ValueError(f"compute_dtype is {compute_dtype}: expected torch.bfloat16, torch.float16 or torch.float32")
    if not isinstance(plan, Plan | None):
        raise TypeError(
            f"plan is a {type(plan).__name__}: expected a lohan_fx.Plan (Plan.from_json reads one), or None"
        )
    if plan is not None and plan.compute_dtype != str(compute_dtype).removeprefix("torch."):
        raise ValueError(f"the plan is for {plan.compute_dtype}, compute_dtype is {compute_dtype}: make them equal")
    if initialize is not None and not callable(initialize):
        raise TypeError(f"initialize is a {type(initialize).__name__}: expected a function of a module")
    if isinstance(forwards, bool) or not isinstance(forwards, int) or forwards < 1:
        raise ValueError(f"forwards is {forwards!r}: expected how many wait for their backwards at once, at least 1")
    if not isinstance(loss_only, bool):
        raise TypeError(f"loss_only is {loss_only!r}: expected True or False")
    if dynamic not in (None, True, False):
        raise ValueError(f"dynamic is {dynamic!r}: expected True, False or None, as of torch.compile")
    if not isinstance(revise, bool):
        raise TypeError(f"revise is {revise!r}: expected True or False")
    if not isinstance(hold_gradients, bool | None):
        raise TypeError(f"hold_gradients is {hold_gradients!r}: expected True, False or None")
    if plan is not None and policy not in (LOHAN.name, plan.policy):
        raise ValueError(
            f"policy is {policy!r}, and {plan.policy!r} made the plan that is given: leave one of them out"
        )
    if plan is not None and dynamic:
        raise ValueError(
            "dynamic=True traces graphs for many shapes, and the plan given is of one: leave one of them out"
        )
    if plan is not None and forwards not in (1, plan.forwards):
        raise ValueError(f"forwards is {forwards}, and the plan given counts {plan.forwards}: leave one of them out")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError(f"this {type(model).__name__} has no parameters: there is nothing to stream")
    for name, parameter in parameters.items():
        _check_parameter(name, parameter)
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise ValueError("this model is compiled by torch.compile already: pass the model as it was before")
    _check_apart(parameters, dict(model.named_buffers()))
    for name, module in model.named_modules():
        _check_statistics(name, module, compute_dtype)


def _check_apart(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
    """Two parameters over the same memory would each get values of their own, and a buffer over a parameter's would keep the
    old ones; two buffers may share. Of those whose elements do not lie in one piece only the first elements are compared: the
    others may lie between one another's."""
    named = [("parameter", *item) for item in parameters.items()] + [("buffer", *item) for item in buffers.items()]
    placed = [(*_place(value), kind, name) for kind, name, value in named if _has_place(value)]
    furthest = {"parameter": (0, ""), "buffer": (0, "")}
    for start, end, kind, name in sorted(placed):
        for other, (until, before) in furthest.items():
            if start < until and "parameter" in (kind, other):
                both = f"parameters {before} and {name}" if kind == other else f"{other} {before} and {kind} {name}"
                remedy = (
                    "make them one parameter (tie them by assigning the parameter, not its data), or give one of them a copy"
                    if kind == other
                    else "read the parameter in forward instead, or give the buffer a copy"
                )
                raise ValueError(f"{both} share memory, and would not any more: {remedy}")
        furthest[kind] = max(furthest[kind], (end, name))


def _has_place(value: torch.Tensor) -> bool:
    return not is_lazy(value) and value.layout == torch.strided and not value.is_meta and value.numel() > 0


def _place(value: torch.Tensor) -> tuple[int, int]:
    """Where it begins and ends in memory; ends after a byte, if its elements do not lie in one piece."""
    start = value.data_ptr()
    spread = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return start, start + (value.nbytes if spread == value.numel() else 1)


def _check_statistics(name: str, module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Kernels take the parameters and the running statistics of a normalisation in one dtype; buffers keep theirs."""
    if not isinstance(module, nn.modules.batchnorm._NormBase) or not module.affine:
        return
    kept = module.running_mean
    if kept is not None and kept.dtype is not compute_dtype:
        raise ValueError(
            f"{name or 'the model'} is a {type(module).__name__} whose running statistics are {kept.dtype}, while its "
            f"parameters would be {compute_dtype}, and no kernel takes both: pass compute_dtype={kept.dtype}, or the model after "
            f"model.to({compute_dtype})"
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, Shell) and parameter.owner is None:
        raise ValueError(
            f"parameter {name} went with a model that was ended by lohan_fx.reset() or an interrupt: build it again"
        )
    if isinstance(parameter, Shell):
        raise ValueError(
            f"parameter {name} is offloaded: the model that this is a part of is compiled already; lohan_fx.release it first"
        )
    if is_lazy(parameter):
        raise ValueError(f"parameter {name} is of a lazy module and has no shape yet: call the model once before")
    if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
        raise ValueError(
            f"parameter {name} is {parameter.dtype}, {parameter.layout}: make it a dense one of float32, bfloat16 or "
            "float16 first"
        )
    if parameter.grad is not None:
        raise ValueError(f"parameter {name} has a gradient, which would be lost: call model.zero_grad() first")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter {name} has a gradient hook, which would never run, because gradients go straight to the "
            "optimizer: remove the hook"
        )


def check_largest(facts: Sequence[ParameterFacts], device_memory_bytes: int) -> None:
    """Raises ``InfeasiblePlan`` where the largest parameter and its gradient do not fit on the device."""
    largest = max(facts, key=lambda p: p.bytes)
    if 2 * largest.bytes > device_memory_bytes:
        raise InfeasiblePlan(
            f"parameter {largest.name} alone takes {largest.bytes:,} bytes, and as much for its gradient; the budget is "
            f"{device_memory_bytes:,}, {2 * largest.bytes - device_memory_bytes:,} bytes short: allow more memory"
        )


def warn_if_slow(hw: HardwareProfile, compute_dtype: torch.dtype) -> None:
    """Whom it concerns is the caller of ``compile``."""
    if hw.lacks_kernels(compute_dtype):
        slow, full = (hw.matmul_rate(dtype) / 1e9 for dtype in (compute_dtype, torch.float32))
        warnings.warn(
            f"matmuls in {str(compute_dtype).removeprefix('torch.')} run at {slow:.3g} GFLOP/s on {hw.device_name}, which "
            f"has no kernels for them, and in float32 at {full:.3g}: compile(compute_dtype=torch.float32) is faster",
            stacklevel=3,
        )


def warn_if_more_than_there_is(hw: HardwareProfile, host_memory_bytes: int | None) -> None:
    """Whom it concerns is the caller of ``compile``."""
    if host_memory_bytes is not None and hw.is_this_machine() and host_memory_bytes > hw.host_memory_bytes:
        warnings.warn(
            f"host_memory promises {host_memory_bytes / 2**30:.3g} GiB, and this machine has {hw.host_memory_bytes / 2**30:.3g}: "
            "what counts on it ends in swapping, or the system ends the process; promise what is free, or leave it out",
            stacklevel=3,
        )


def warn_if_laid_out_anew(model: nn.Module) -> None:
    """Whom it concerns is the caller of ``compile``."""
    names = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    if names:
        which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        warnings.warn(
            f"not contiguous (transposed, or channels_last), and contiguous from here on: {which}. Kernels may be others than in "
            "eager, and the last bits of what they compute. Inputs in channels_last keep convolutions in it",
            stacklevel=3,
        )


def wake(hw: HardwareProfile, compute_dtype: torch.dtype) -> None:
    """What a process's first work on a GPU brings into its RAM (the context, the libraries of matmuls and of attention) is there
    before it is counted: it is none of what a plan promises."""
    if hw.device != "cuda":
        return
    with torch.enable_grad(), contextlib.suppress(RuntimeError):  # such as of torch.use_deterministic_algorithms
        x = torch.ones(1, 2, 64, 64, dtype=compute_dtype, device="cuda", requires_grad=True)
        attended = nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True)
        nn.functional.gelu(nn.functional.layer_norm(attended, (64,))).float().softmax(-1).square().sum().backward()
    torch.cuda.synchronize()


def warn_if_not_measured_here_and_now(hw: HardwareProfile) -> None:
    """Whom it concerns is the caller of ``compile``."""
    if not hw.is_this_machine():
        warnings.warn(
            f"the hardware profile {hw.name!r} was not measured on this machine: plans and predictions are for that "
            "one; HardwareProfile.measure(nvme=[...]) measures this one",
            stacklevel=3,
        )
    elif hw.is_outdated():
        warnings.warn(
            f"the hardware profile {hw.name!r} was measured by another version of lohan_fx, which measured otherwise: "
            "predictions may be off by a quarter; HardwareProfile.measure(nvme=[...]) measures anew",
            stacklevel=3,
        )
