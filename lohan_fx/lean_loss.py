"""lean_loss: a language model's loss in little device memory.

Hugging Face's causal language models hand back all logits beside the loss and take the loss over them at once, in
float32. At a large batch that is most of the device's memory: for 32 x 1024 tokens of 50257 words 24 GB, where the
blocks themselves need a few. Here the loss is taken in pieces, each of which the planner may recompute, and the logits
are not handed back. The numbers are the same sums in another order.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

PIECE_BYTES = 512 << 20
"""Float32 logits of one piece."""


def with_lean_loss(model: nn.Module) -> nn.Module:
    """``model``, a Hugging Face causal language model, whose output has the loss and no logits where it got labels; the
    same object. To be called before ``lohan_fx.compile``.

    Raises ``TypeError`` for a model that does not let its loss be replaced, or whose loss is another than
    ``ForCausalLMLoss``. A second call changes nothing.
    """
    if getattr(model, "loss_function", None) is lean_causal_loss:
        return model
    if why_not := why_no_lean_loss(model):
        raise TypeError(why_not)
    setattr(model, "loss_function", lean_causal_loss)  # noqa: B010  a property, which mypy does not know
    patched = vars(model).get("forward")
    if patched is not None and getattr(patched, "__self__", None) is not model:

        @functools.wraps(patched)
        def of_patched(*args: Any, **kwargs: Any) -> Any:
            return _without_logits(patched(*args, **kwargs))

        model.forward = of_patched
        return model

    @functools.wraps(type(model).forward if patched is None else patched.__func__)
    def of_model(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = type(self).forward if patched is None else patched.__func__
        return _without_logits(original(self, *args, **kwargs))

    # A method, which a copy of the model binds to itself.

    model.forward = types.MethodType(of_model, model)
    return model


def why_no_lean_loss(model: nn.Module) -> str:
    """Why the loss of ``model`` cannot be taken in pieces; "" where it can, and is not yet."""
    if not hasattr(type(model), "loss_function"):
        return f"{type(model).__name__} has no loss_function to replace: expected a Hugging Face language model"
    loss: Any = model.loss_function
    found = getattr(loss, "__name__", type(loss).__name__)
    if found != "ForCausalLMLoss":
        return (
            f"the loss of {type(model).__name__} is {found}, and only ForCausalLMLoss, of the next token, is taken in pieces: "
            "compile the model without with_lean_loss"
        )
    return ""


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):  # with return_dict=False; the loss comes first, where there is one
        has_loss = isinstance(output[0], torch.Tensor) and not output[0].dim()
        return (output[0], *output[2:]) if has_loss else output
    if output.loss is None:
        return output
    # Made anew: setting the field to None would leave the logits among the output's items.
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def lean_causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """What Hugging Face's ``ForCausalLMLoss`` returns, in pieces. ``logits`` (B, T, V), ``labels`` (B, T)."""
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = max(1, PIECE_BYTES // (4 * vocab_size))
    wanted = shift_labels.reshape(-1)
    pieces = zip(logits.view(-1, vocab_size).split(rows), wanted.split(rows), strict=True)
    losses = [cross_entropy(p.float(), w, ignore_index=ignore_index, reduction="sum") for p, w in pieces]
    count = (wanted != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.stack(losses).sum() / count
