"""random_state: all generators that a training draws from: Python's, numpy's, torch's on the CPU and on each GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from lohan_fx.checkpoints.plain_json import decoded, encoded


def random_state() -> dict[str, Any]:
    """Where they are, as JSON."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    found: dict[str, Any] = encoded(
        {
            "python": random.getstate(),
            "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        },
        "the random state",
    )
    return found


@dataclass(frozen=True)
class Generators:
    """Where all of them were, checked: ``set`` puts them there."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    gpus: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, state: Any) -> Self:
        """From what ``random_state`` returned. Raises ``ValueError`` for anything else, and for more GPUs than there are."""
        try:
            found = decoded(state)
            kind, keys, position, has_gauss, gauss = found["numpy"]
            numpy = kind, np.array(keys, np.uint32), position, has_gauss, gauss
            random.Random().setstate(found["python"])
            np.random.RandomState().set_state(numpy)
            torch.Generator().set_state(found["torch"])
            gpus = tuple(found["cuda"])
            if len(gpus) > torch.cuda.device_count():
                raise RuntimeError(f"it is of {len(gpus)} GPUs, here are {torch.cuda.device_count()}")
            for index, gpu in enumerate(gpus):
                torch.Generator(f"cuda:{index}").set_state(gpu)
            return cls(found["python"], numpy, found["torch"], gpus)
        except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"the random state of the checkpoint cannot be set: {error}") from error

    def set(self) -> None:
        """Draw from there on."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(self.gpus)
