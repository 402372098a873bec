"""compile: from a model to the same model, streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lohan_fx import inductor, ops, process_memory
from lohan_fx.checkpoints.resuming import as_on_disk, take_up, to_resume
from lohan_fx.compile_arguments import (
    check_arguments,
    check_largest,
    wake,
    warn_if_laid_out_anew,
    warn_if_more_than_there_is,
    warn_if_not_measured_here_and_now,
    warn_if_slow,
)
from lohan_fx.compiled_model import ATTRIBUTE, CompiledModel, living
from lohan_fx.hardware import HardwareProfile
from lohan_fx.parameters.filling import allocate, buffers_to_resume, check_files, fill, install
from lohan_fx.parameters.meta_init import Initialize
from lohan_fx.parameters.original_parameters import slots_of
from lohan_fx.parameters.shell import Shell
from lohan_fx.parameters.weight_files import Weights, open_weights
from lohan_fx.plan import Plan, Windows
from lohan_fx.planning.budgets import (
    choose_windows,
    default_host_memory_bytes,
    make_budgets,
    mean_request_bytes,
    parse_bytes,
    threads_bytes,
)
from lohan_fx.planning.problem import ParameterFacts
from lohan_fx.planning.staging import least_chunk_elements
from lohan_fx.request import Request
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.store_directories import Directories, bandwidths, directories_for, drives_of, is_temporary

Bytes = int | float | str


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
    forwards: int = 1,
    loss_only: bool = False,
    dynamic: bool | None = None,
    initialize: Initialize | None = None,
    weights: Weights | None = None,
) -> nn.Module:
    """Stream ``model``: the same object, whose parameters and optimizer states live where the plan puts them.

    Parameters become shells; their fp32 masters, moments and ``compute_dtype`` copies go to the store. The graphs are
    captured and planned at the first call (or by ``prepare``). Buffers stay.

    A model built under ``torch.device("meta")`` never is in memory as a whole: its parameters are made module by module
    on their way to the store, or read from files piece by piece (``meta_init`` says which numbers they get).

    Args:
        hw: the machine; its rates decide the plan, its directories are the default for ``nvme``.
        host_memory: the most that the process may grow by from here on (bytes, or text such as "6GiB"); on a CPU this
            covers device memory too. None: most of what is free now.
        device_memory: the most to use on the compute device, without what its libraries take for themselves (cuBLAS 64 MiB
            on an H100). None: most of what is free there; ``host_memory`` on a CPU.
        nvme: a directory per drive. None: those of ``hw``, or one under the user's cache directory.
        compute_dtype: dtype of parameters and activations; masters and moments are fp32.
        policy: who decides; ``print(lohan_fx.policies())`` lists them. "lohan" searches for the fastest plan.
        plan: obey this plan instead of making one; it must be of this model and input shape, and made by ``policy`` where that is
            named.
        revise: let the first steps correct the profile, and replace the plan once if that pays (``self_check``); only
            where the profile was measured on this machine, and its device is the CPU. No number changes by it.
        segments: whether runs of pointwise ops are compiled into kernels, for training: "boxed": no; "auto": where it saves
            enough, as measured; "inductor": all that can be. No number changes by it; what cannot be compiled exactly, or
            at all, runs op by op. On the processor measured it gains 1% at most and takes 15 s once (docs/0015).
        checkpoints: how many checkpoints ``lohan_fx.checkpoint`` is to keep in ``nvme``, each for the disk space of the
            states once more, taken now. 0: it is taken by the first checkpoint, if there ever is one.
        max_bytes_written: the most that the training may ever write to the drives (bytes, or text such as "500TB"), which
            wear out by it. Where the next step would write more, ``optimizer.step()`` makes a checkpoint (if ``nvme`` or ``hw``
            names directories) and raises ``WearBudgetExceeded``. The count goes on after a resume. None: no limit.
        resume_from_checkpoint: take parameters and states from the last checkpoint in ``nvme`` instead of from ``model``
            (True: if there is one; directories: those, and there must be one). ``lohan_fx.resume`` then does the rest.
        hold_gradients: keep all gradients until ``optimizer.step()``, which clipping, loss scaling and ``lohan_fx.grad`` need,
            and update beside the next forward. They wait in what the plan leaves of ``host_memory``, else on NVMe. None: from
            the start in fp16; otherwise from the first clipping or unscaling on, which raises ``StepError`` where that step's
            updates have run already.
        forwards: how many calls of the model wait for their backwards at once, such as two or three with a contrastive loss: each
            keeps its activations. What turns out to be more is counted by the plans that follow (docs/0047).
        loss_only: the loop keeps nothing of what a call returns but the loss, as ``loss = model(**batch).loss`` and Hugging
            Face's ``Trainer`` do. False: it may hold all of it until after the next call, as ``outputs = model(**batch)`` does,
            and plans have room for that: the logits of a step beside its backward and the next forward (docs/0056).
        dynamic: whether the graphs that train hold for inputs of other sizes, as of ``torch.compile``. None: the second shape is
            traced so that smaller ones need no graphs of their own; True: the first one is, too; False: each shape gets graphs
            and a plan of its own, which may be faster. Larger ones are planned anew in any case (docs/0048).
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
    check_arguments(
        model, hw, compute_dtype, policy, plan, initialize, forwards, loss_only, dynamic, revise, hold_gradients
    )
    host = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    device = None if device_memory is None else parse_bytes(device_memory, "device_memory")
    max_written = None if max_bytes_written is None else parse_bytes(max_bytes_written, "max_bytes_written")
    warn_if_not_measured_here_and_now(hw)
    warn_if_slow(hw, compute_dtype)
    warn_if_more_than_there_is(hw, host)
    warn_if_laid_out_anew(model)
    segments = inductor.mode_for(segments, hw.device, host or default_host_memory_bytes(hw))
    wake(hw, compute_dtype)
    before = process_memory.now()
    found = slots_of(model, compute_dtype, ops.new_slots)
    slots = [slot for slot, _ in found.values()]
    facts = tuple(ParameterFacts(s.name, s.numel, s.compute_bytes, s.trainable) for s in slots)
    files = None if weights is None else open_weights(weights)
    if files is not None:
        check_files(model, found, files)
    nvme, manifests = to_resume(nvme, hw, resume_from_checkpoint, checkpoints)

    def windows_of(promise_bytes: int) -> Windows:
        shared, drives = hw.device == "cpu", drives_of(nvme, hw)
        found = plan.windows if plan else choose_windows(promise_bytes, facts, shared=shared, drives=drives)
        return as_on_disk(found, manifests[-1], plan) if manifests else found

    windows = windows_of(host or default_host_memory_bytes(hw))
    kernels_bytes = threads_bytes(hw, torch.get_num_threads())
    kernels_bytes += 0 if segments == inductor.BOXED else inductor.COMPILER_BYTES
    budgets = make_budgets(hw, host, device, windows, len(facts), kernels_bytes, windows_of)
    check_largest(facts, budgets.device_memory_bytes)
    request = Request(
        hw=hw.at_requests(mean_request_bytes(facts, windows)),
        policy=policy,
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        matmul_rate=hw.matmul_rate(compute_dtype),
        parameters=facts,
        budgets=budgets,
        windows=windows,
        plan=plan,
        revise=revise,
        segments=segments,
        chooses_sizes=plan is None and not manifests,
        windows_of=windows_of,
        forwards=forwards,
        loss_only=loss_only,
        dynamic=False if plan else dynamic,
    )
    with contextlib.ExitStack() as undo:
        directories, cleanup = directories_for(nvme, hw)
        undo.callback(cleanup)
        rates = bandwidths(directories, hw)
        store = NvmeStore(directories, weights=rates, resume=manifests, temporary=is_temporary(nvme, hw))
        undo.callback(store.close)
        engine = Engine(slots, store, torch.device("cuda" if hw.device == "cuda" else "cpu"))
        undo.callback(engine.close)
        engine.states.chunk_elements = windows.chunk_elements
        engine.wear.max_bytes = max_written
        engine.updates.holds = compute_dtype is torch.float16 if hold_gradients is None else hold_gradients
        left_bytes = budgets.host_memory_bytes - (process_memory.rss_bytes() - before.rss_bytes)
        if manifests:
            undo.callback(install(buffers_to_resume(model, initialize, most_bytes=left_bytes)))
            take_up(model, engine, manifests[-1])
        else:
            least = least_chunk_elements(windows) if request.chooses_sizes else windows.chunk_elements
            allocate(engine, found, checkpoints, least)
            undo.callback(install(fill(engine, model, found, initialize, files, most_bytes=left_bytes)))
        originals = {slot: original for slot, (_, original) in found.items()}
        CompiledModel(model, engine, request, originals, cleanup, before=before).attach()
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
    many times the RAM. What was to outlive it is in a checkpoint. Nothing is left to do where the model was released, or
    ended by ``reset``, inside.
    """
    runtime = compiled(model)
    try:
        yield model
    except (KeyboardInterrupt, SystemExit):
        runtime.abandon()
        raise
    except BaseException:
        if runtime.engine.inherited:  # its parent goes on
            runtime.abandon()
        else:
            runtime.release()
        raise
    runtime.release()


def reset(*models: nn.Module) -> None:
    """End ``models``, or every model that this process has compiled, at once: files, threads and memory go, and no model gets its
    parameters back, as at the end of the process. For searches, whose trials are not kept, and for notebooks, where a cell that
    ran twice has left a model that no variable leads to. Raises ``ValueError`` for one that is not compiled."""
    ended = [compiled(model) for model in models] if models else list(living)
    with contextlib.ExitStack() as all_of_them:  # also the others where one fails
        for found in ended:
            all_of_them.callback(found.abandon)


def prepare(model: nn.Module, *args: object, **kwargs: object) -> Plan:
    """Capture, plan and link ``model`` for these inputs without running it; the plan, with its prediction.

    Under ``torch.no_grad()``, or where nothing is trainable, that is the plan of an evaluation. Raises ``ValueError`` if the
    model is not compiled, ``CaptureError`` where it cannot be captured as one graph, and ``InfeasiblePlan`` where memory cannot
    hold any plan.
    """
    return compiled(model).prepare(*args, **kwargs)


def compiled(model: nn.Module) -> CompiledModel:
    """What ``compile`` left with ``model``. Raises ``ValueError`` if it was not compiled, or has been released, and
    ``TypeError`` for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model that lohan_fx.compile has streamed; got {type(model).__name__}")
    found = getattr(model, ATTRIBUTE, None)
    if found is None and any(isinstance(p, Shell) and p.owner is None for p in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} was ended by lohan_fx.reset() or an interrupt: build it again, and compile it"
        )
    if not isinstance(found, CompiledModel):
        raise ValueError(f"this {type(model).__name__} is not compiled: call lohan_fx.compile(model, hw) first")
    return found
