"""The same training in plain PyTorch, with everything in memory: what lohan_fx must be equal to.

The precision recipe is the same: weights and activations in ``--dtype``; fp32 masters, which AdamW updates and which are
then cast back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from python_sources import PythonSources

from lohan_fx import process_memory


@dataclass(frozen=True)
class Plain:
    """What plain PyTorch took. ``peak_bytes``: RAM that was not in use before the model was built."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int


def train_plain(
    build_model: Callable[[argparse.Namespace], Any],
    factor: Callable[[int], Callable[[int], float]],
    args: argparse.Namespace,
) -> Plain:
    """Train the model of ``build_model(args)`` on the batches that ``args`` say. Its process should do nothing else."""
    text = PythonSources(batch=args.batch, seq=args.seq, seed=args.seed, device=args.device)
    before_bytes = process_memory.rss_bytes()
    process_memory.forget_peak_rss()
    model = build_model(args).to(args.device)
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(masters, lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor(args.steps))
    call = model if args.compare == "eager" else torch.compile(model, backend=args.compare, dynamic=False)
    model.train()
    losses, seconds = [], []
    for number in range(args.steps):
        begin_s = time.perf_counter()
        batch = text.batch(number)
        loss = call(input_ids=batch, labels=batch).loss
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - begin_s)
    return Plain(losses, seconds, process_memory.peak_rss_bytes() - before_bytes)
