"""peer_traffic: where our states were in a run of ``peers.py``, as it tells it and as docs/performance.md does. Internal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def traffic(run: Mapping[str, Any]) -> str:
    """What a step of ours moved on NVMe, and where its states were. ``run``: figures of ``peer_ours.py``; earlier ones do not say
    how many bytes of states were where; where nothing is moved none are on NVMe, since a step reads and writes all that are."""
    read_bytes, written_bytes = run["nvme_read_bytes"], run["nvme_written_bytes"]
    if not read_bytes and not written_bytes:
        return "nothing on NVMe: all states in memory"
    moved = f"{read_bytes / 1e9:.1f} GB read and {written_bytes / 1e9:.1f} GB written on NVMe per step"
    if "states_bytes" not in run:
        return f"{moved}; how much of it for states was not saved"
    return f"{moved}; {run['nvme_states_bytes'] / 1e9:.1f} of {run['states_bytes'] / 1e9:.1f} GB of states on NVMe"
