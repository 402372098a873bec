"""random_state: all generators that a training draws from: Python's, numpy's, torch's on the CPU and on each GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lohan_fx.plain_json import decoded, encoded


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


def set_random_state(state: Any) -> None:
    """Put them there. Raises ``ValueError`` for anything that ``random_state`` did not return."""
    found = decoded(state)
    try:
        kind, keys, position, has_gauss, gauss = found["numpy"]
        random.setstate(found["python"])
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(found["torch"])
        if found["cuda"]:
            torch.cuda.set_rng_state_all(found["cuda"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the random state of the checkpoint cannot be set: {error}") from error
