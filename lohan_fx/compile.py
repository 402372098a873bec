"""compile: from a model to the same model, streamed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lohan_fx import inductor, ops, process_memory
from lohan_fx.budgets import choose_windows, default_host_memory_bytes, make_budgets, parse_bytes
from lohan_fx.compiled_model import ATTRIBUTE, CompiledModel, slots_of
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.filling import allocate, buffers_to_resume, check_files, fill, install
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta_init import Initialize
from lohan_fx.pipeline import Request
from lohan_fx.plan import Plan, Windows
from lohan_fx.policies import runnable
from lohan_fx.problem import ParameterFacts
from lohan_fx.resuming import chunk_elements_of, manifests_to_resume, take_up
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.manifest import MAX_SLOTS, Manifest
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.store_arguments import check_directory
from lohan_fx.shell import Shell
from lohan_fx.weight_files import Weights, open_weights

Bytes = int | float | str
Directories = str | Path | Sequence[str | Path]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_run_numbers = itertools.count()


def compile(
    model: nn.Module,
    hw: HardwareProfile,
    *,
    host_memory: Bytes | None = None,
    device_memory: Bytes | None = None,
    nvme: Directories | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
    policy: str = "lohan",
    plan: Plan | None = None,
    revise: bool = True,
    segments: str = inductor.BOXED,
    checkpoints: int = 0,
    max_bytes_written: Bytes | None = None,
    resume_from_checkpoint: bool | Directories = False,
    hold_gradients: bool | None = None,
    initialize: Initialize | None = None,
    weights: Weights | None = None,
) -> nn.Module:
    """Stream ``model``: the same object, whose parameters and optimizer states live where the plan puts them.

    Parameters become shells; their fp32 masters, moments and ``compute_dtype`` copies go to the store. The graphs are
    captured and planned at the first call (or by ``prepare``), per input shape. Buffers stay.

    A model built under ``torch.device("meta")`` never is in memory as a whole: its parameters are made module by module
    on their way to the store, or read from files piece by piece (``meta_init`` says which numbers they get).

    Args:
        hw: the machine; its rates decide the plan, its directories are the default for ``nvme``.
        host_memory: the most that the process may grow by from here on (bytes, or text such as "6GiB"); on a CPU this
            covers device memory too. None: most of what is free now.
        device_memory: the most to use on the compute device. None: what it has, within ``host_memory`` on a CPU.
        nvme: a directory per drive. None: those of ``hw``, or one under the user's cache directory.
        compute_dtype: dtype of parameters and activations; masters and moments are fp32.
        policy: who decides; ``print(lohan_fx.policies())`` lists them. "lohan" searches for the fastest plan.
        plan: obey this plan instead of making one; it must be of this model and input shape.
        revise: let the first steps correct the profile, and replace the plan once if that pays (``self_check``); only
            where the profile was measured on this machine. No number changes by it.
        segments: whether runs of pointwise ops are compiled into kernels, for training: "boxed": no; "auto": where it saves
            enough, as measured; "inductor": all that can be. No number changes by it; what cannot be compiled exactly, or
            at all, runs op by op. On the processor measured it gains 1% at most and takes 15 s once (docs/0015).
        checkpoints: how many checkpoints ``lohan_fx.checkpoint`` is to keep in ``nvme``, each for the disk space of the
            states once more, taken now. 0: it is taken by the first checkpoint, if there ever is one.
        max_bytes_written: the most that the training may ever write to the drives (bytes, or text such as "500TB"), which
            wear out by it. Where the next step would write more, ``optimizer.step()`` makes a checkpoint (if ``nvme`` names
            directories) and raises ``WearBudgetExceeded``. The count goes on after a resume. None: no limit.
        resume_from_checkpoint: take parameters and states from the last checkpoint in ``nvme`` instead of from ``model``
            (True: if there is one; directories: those, and there must be one). ``lohan_fx.resume`` then does the rest.
        hold_gradients: keep all gradients until ``optimizer.step()``, which clipping, loss scaling and ``lohan_fx.grad`` need,
            and update beside the next forward. They wait in what the plan leaves of ``host_memory``, else on NVMe. None: in
            fp16, and else from the first use on, if that step's gradients are still there then.
        initialize: sets the parameters and buffers of a module on ``meta``, which are in CPU memory by then; called for
            each module that has any, and to leave its children alone. None: the model's own ``reset_parameters`` and
            ``_init_weights``.
        weights: take parameters and the buffers of ``state_dict`` from safetensors instead: a file, several, or a folder
            with one file or with shards and their index. Names and shapes must be those of ``model.state_dict()``.

    Raises:
        ValueError, TypeError: a bad argument; a model compiled already, with unsupported dtypes, or on ``meta`` without
            a way to get its values; weights that are not this model's.
        InfeasiblePlan: the memory cannot hold any plan (also at the first call, when the graphs are known).
        WearBudgetExceeded: ``max_bytes_written`` does not even let the model be stored.
        StoreError: the store cannot be made; nothing is left behind, and the model is as it was.
    """
    _check(model, hw, compute_dtype, policy, plan)
    host = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    device = None if device_memory is None else parse_bytes(device_memory, "device_memory")
    max_written = None if max_bytes_written is None else parse_bytes(max_bytes_written, "max_bytes_written")
    if not hw.is_this_machine():
        warnings.warn(
            f"the hardware profile {hw.name!r} was not measured on this machine: plans and predictions are for that "
            "one; HardwareProfile.measure(nvme=[...]) measures this one",
            stacklevel=2,
        )
    segments = inductor.mode_for(segments, hw.device, host or default_host_memory_bytes(hw))
    rss_before_bytes = process_memory.rss_bytes()
    found = slots_of(model, compute_dtype, ops.new_slots)
    slots = [slot for slot, _ in found.values()]
    facts = tuple(ParameterFacts(s.name, s.numel, s.compute_bytes, s.trainable) for s in slots)
    if initialize is not None and not callable(initialize):
        raise TypeError(f"initialize is a {type(initialize).__name__}: expected a function of a module")
    files = None if weights is None else open_weights(weights)
    if files is not None:
        check_files(model, found, files)
    nvme, manifests = _to_resume(nvme, hw, resume_from_checkpoint, checkpoints)
    windows = plan.windows if plan else choose_windows(host or default_host_memory_bytes(hw), facts)
    if manifests:
        windows = _as_on_disk(windows, manifests[-1], plan)
    compiler_bytes = 0 if segments == inductor.BOXED else inductor.COMPILER_BYTES
    budgets = make_budgets(hw, host, device, windows, len(facts), compiler_bytes)
    _check_largest(facts, budgets.device_memory_bytes)
    request = Request(
        hw=hw,
        policy=policy,
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        matmul_rate=hw.matmul_rate(compute_dtype),
        parameters=facts,
        budgets=budgets,
        windows=windows,
        plan=plan,
        revise=revise,
        segments=segments,
    )
    with contextlib.ExitStack() as undo:
        temporary = _is_temporary(nvme, hw)
        directories, cleanup = _directories(nvme, hw)
        undo.callback(cleanup)
        store = NvmeStore(directories, weights=_weights(directories, hw), resume=manifests, temporary=temporary)
        undo.callback(store.close)
        engine = Engine(slots, store, torch.device("cuda" if hw.device == "cuda" else "cpu"))
        undo.callback(engine.close)
        engine.states.chunk_elements = windows.chunk_elements
        engine.wear.max_bytes = max_written
        engine.holds = compute_dtype is torch.float16 if hold_gradients is None else hold_gradients
        if manifests:
            undo.callback(install(buffers_to_resume(model, initialize)))
            take_up(model, engine, manifests[-1])
        else:
            allocate(engine, found, checkpoints)
            undo.callback(install(fill(engine, model, found, initialize, files)))
        originals = {slot: original for slot, (_, original) in found.items()}
        CompiledModel(model, engine, request, originals, cleanup, rss_before_bytes=rss_before_bytes).attach()
        undo.pop_all()
    return model


def release(model: nn.Module) -> nn.Module:
    """Give ``model`` ordinary parameters again, with the values trained so far, and remove the files; the same object.

    The parameters get the dtype they had before ``compile``. Raises ``ValueError`` if the model is not compiled.
    """
    compiled(model).release()
    return model


@contextlib.contextmanager
def releasing(model: nn.Module) -> Iterator[nn.Module]:
    """``with lohan_fx.releasing(lohan_fx.compile(model, hw)) as model:`` releases at the end, whatever happens.

    After Ctrl-C (and ``SystemExit``) files and threads go at once, and the model gets no parameters back: they may be
    many times the RAM. What was to outlive it is in a checkpoint.
    """
    runtime = compiled(model)
    try:
        yield model
    except (KeyboardInterrupt, SystemExit):
        runtime.abandon()
        raise
    except BaseException:
        release(model)
        raise
    release(model)


def prepare(model: nn.Module, *args: object, **kwargs: object) -> Plan:
    """Capture, plan and link ``model`` for these inputs without running it; the plan, with its prediction."""
    return compiled(model).prepare(*args, **kwargs)


def compiled(model: nn.Module) -> CompiledModel:
    """What ``compile`` left with ``model``. Raises ``ValueError`` if it was not compiled, or has been released."""
    found = getattr(model, ATTRIBUTE, None)
    if not isinstance(found, CompiledModel):
        raise ValueError(f"this {type(model).__name__} is not compiled: call lohan_fx.compile(model, hw) first")
    return found


def _check(model: nn.Module, hw: HardwareProfile, compute_dtype: torch.dtype, policy: str, plan: Plan | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile() takes a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(hw, HardwareProfile):
        raise TypeError(
            f"hw is a {type(hw).__name__}: expected HardwareProfile.measure(...), .load(...) or .preset(...)"
        )
    if hw.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the hardware profile {hw.name!r} is of a CUDA device, and this process sees none")
    if any(hasattr(module, ATTRIBUTE) for module in model.modules()):
        raise ValueError("this model (or a part of it) is compiled already: lohan_fx.release(model) first")
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise ValueError("this model is compiled by torch.compile already: pass the model as it was before")
    runnable(policy)
    if compute_dtype not in _DTYPES:
        raise ValueError(f"compute_dtype is {compute_dtype}: expected torch.bfloat16, torch.float16 or torch.float32")
    if not isinstance(plan, Plan | None):
        raise TypeError(
            f"plan is a {type(plan).__name__}: expected a lohan_fx.Plan (Plan.from_json reads one), or None"
        )
    if plan is not None and plan.compute_dtype != str(compute_dtype).removeprefix("torch."):
        raise ValueError(f"the plan is for {plan.compute_dtype}, compute_dtype is {compute_dtype}: make them equal")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError(f"this {type(model).__name__} has no parameters: there is nothing to stream")
    for name, parameter in parameters.items():
        _check_parameter(name, parameter)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
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


def _check_largest(facts: Sequence[ParameterFacts], device_memory_bytes: int) -> None:
    largest = max(facts, key=lambda p: p.bytes)
    if 2 * largest.bytes > device_memory_bytes:
        raise InfeasiblePlan(
            f"parameter {largest.name} alone takes {largest.bytes:,} bytes, and as much for its gradient; the budget is "
            f"{device_memory_bytes:,}, {2 * largest.bytes - device_memory_bytes:,} bytes short: allow more memory"
        )


def _directories(nvme: Directories | None, hw: HardwareProfile) -> tuple[list[Path], Callable[[], None]]:
    """Where the store goes, and what removes what this call had to make."""
    if nvme is not None:
        given = [nvme] if isinstance(nvme, str | Path) else nvme
        if not isinstance(given, Sequence) or not all(isinstance(directory, str | Path) for directory in given):
            raise TypeError(f"nvme is {nvme!r}: expected a directory, or a list with a directory per drive")
        if not given:
            raise ValueError("nvme is an empty list: name at least one directory, or pass None for the default")
        directories = [Path(directory) for directory in given]
        if len({directory.resolve() for directory in directories}) < len(directories):
            raise ValueError(f"nvme names a directory twice: {', '.join(map(str, directories))}; name each drive once")
        return directories, lambda: None
    known = [Path(drive.directory) for drive in hw.nvme if drive.directory]
    if known:
        return known, lambda: None
    root = default_nvme_root()
    _remove_stale(root)
    directory = root / f"run-{os.getpid()}-{next(_run_numbers)}"
    directory.mkdir(parents=True, mode=0o700)
    return [directory], lambda: shutil.rmtree(directory, ignore_errors=True)


def _to_resume(
    nvme: Directories | None, hw: HardwareProfile, resume: bool | Directories, checkpoints: int
) -> tuple[Directories | None, list[Manifest]]:
    """The directories for the store, and the checkpoints there that it is to begin with."""
    if not isinstance(resume, bool | str | Path | Sequence):
        raise TypeError(f"resume_from_checkpoint is {resume!r}: expected True, a directory, or one per drive")
    if type(checkpoints) is not int or not 0 <= checkpoints < MAX_SLOTS:
        raise ValueError(f"checkpoints is {checkpoints!r}: expected how many to keep, 0 to {MAX_SLOTS - 1}")
    if not resume and not checkpoints:
        return nvme, []
    named = not isinstance(resume, bool)
    if not isinstance(resume, bool):
        if nvme is not None:
            raise ValueError("both nvme and resume_from_checkpoint name directories: name them in one place")
        nvme = resume
    if _is_temporary(nvme, hw):
        raise ValueError("checkpoints need directories that outlive this run: name them with nvme=")
    if not resume:
        return nvme, []
    directories, _ = _directories(nvme, hw)
    for directory in directories:
        check_directory(directory)
    manifests = manifests_to_resume(directories, must_exist=named)
    if manifests and checkpoints not in (0, manifests[-1].keep):
        raise ValueError(
            f"checkpoints={checkpoints}, but the run that is resumed keeps {manifests[-1].keep}: leave it out, it is kept"
        )
    return directories, manifests


def _as_on_disk(windows: Windows, manifest: Manifest, plan: Plan | None) -> Windows:
    """The windows, with chunks as the states on disk are cut."""
    chunk_elements = chunk_elements_of(manifest)
    if plan is not None and plan.windows.chunk_elements != chunk_elements:
        raise ValueError(
            f"the plan has chunks of {plan.windows.chunk_elements} elements, the checkpoint of {chunk_elements}: leave the "
            "plan out, or make one with these chunks"
        )
    return dataclasses.replace(windows, chunk_elements=chunk_elements)


def _is_temporary(nvme: Directories | None, hw: HardwareProfile) -> bool:
    """Whether the store goes to a directory that is made for this run alone."""
    return nvme is None and not any(drive.directory for drive in hw.nvme)


def default_nvme_root() -> Path:
    """``~/.cache/lohan_fx`` or its equivalent: unlike ``/tmp`` rarely in RAM."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lohan_fx"


def _remove_stale(root: Path) -> None:
    """Remove what runs that were killed have left in the default place."""
    for directory in root.glob("run-*-*"):
        pid = directory.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _weights(directories: Sequence[Path], hw: HardwareProfile) -> list[float] | None:
    """The measured bandwidth of each directory, where the profile knows all of them."""
    rates = {Path(d.directory).resolve(): d.mixed_bytes_per_s for d in hw.nvme if d.directory}
    found = [rates.get(directory.resolve()) for directory in directories]
    return [rate for rate in found if rate is not None] if None not in found else None
