"""saved_dtype: which dtype the config beside saved weights of Transformers names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
_KEYS = ("dtype", "torch_dtype")


def note_dtype(folder: Path, computed: str, saved: str) -> None:
    """``from_pretrained`` loads in the dtype that ``CONFIG_FILE`` in ``folder`` names, if there is one. Where that is what the
    model computed in ("bfloat16"), it is changed to that of the ``saved`` tensors ("float32"), also in configs of its parts."""
    path = folder / CONFIG_FILE
    if computed == saved or not path.is_file():
        return

    def noted(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: saved if k in _KEYS and v == computed else noted(v) for k, v in value.items()}

    config = noted(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")  # as Transformers writes it
