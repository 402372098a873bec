"""lane_jobs: how many jobs the lanes get, counted from a plan's windows: requests of the drives, copies and updates.

Each is a function call on a lane's thread, and so takes the interpreter for a while from the thread that runs the graph
(docs/0043).
Ensures: a value. The counts are those of the runtime (``inbound``, ``activation_swap``, ``chunk_pipeline``).
"""

from __future__ import annotations

from lohan_fx.plan import OptimizerTiming, ParameterPlan, Tier, Windows


def pieces(nbytes: int, windows: Windows) -> int:
    """Transfers that ``nbytes`` are cut into."""
    return -(-nbytes // windows.io_bytes)


def chunks(p: ParameterPlan, windows: Windows) -> int:
    """Updates of ``p`` in a step, made once."""
    return -(-p.numel // windows.chunk_elements)


def streamed_back(p: ParameterPlan) -> int:
    """Bytes of the compute-dtype copy that the update writes to NVMe; none where it is the master itself."""
    own_copy = p.bytes != 4 * p.numel or p.states_home is not Tier.NVME
    return p.bytes if p.home is Tier.NVME and own_copy else 0


def update_requests(p: ParameterPlan, windows: Windows) -> int:
    """Per chunk: master and moments are read and written, and the compute-dtype copy written; gradients that wait, too."""
    states = 0 if p.states_home is not Tier.NVME else 2 if p.updated_twice else 4
    return chunks(p, windows) * (states + (streamed_back(p) > 0) + (p.gradient_home is Tier.NVME))


def repeated_requests(p: ParameterPlan, windows: Windows) -> int:
    """Of the second time of an update that is made twice: master and moments each way, and gradients that wait."""
    return chunks(p, windows) * (4 + (p.gradient_home is Tier.NVME)) if p.updated_twice else 0


def jobs_of_transfer(nbytes: int, tier: Tier, windows: Windows) -> int:
    """Jobs that bring ``nbytes`` from ``tier`` to a GPU, or take them there: one copy between it and host memory, or for each
    piece a copy and a request."""
    return {Tier.DEVICE: 0, Tier.HOST: 1, Tier.NVME: 2 * pieces(nbytes, windows)}[tier]


def jobs_of_parameter(
    p: ParameterPlan, fetches: tuple[int, int], runs: OptimizerTiming, windows: Windows
) -> tuple[int, int]:
    """Jobs beside the (forward, backward) for a parameter of a GPU's model, which so many nodes of each fetch.

    ``runs``: the stage that its update lengthens (``ParameterPlan.runs_beside``). Beside what runs after the backward nothing is
    launched.
    """
    fetch = jobs_of_transfer(p.bytes, p.home, windows)
    forward, backward = (times * fetch for times in fetches)
    if not p.trainable or p.in_memory_of("cuda"):
        return forward, backward
    each = chunks(p, windows)
    if p.gradient_home is None:
        if runs is OptimizerTiming.IN_BACKWARD:
            backward += 2 * each + update_requests(p, windows)  # off the device, and the update
        return forward, backward
    if p.gradient_home is not Tier.DEVICE:
        backward += (2 + (p.gradient_home is Tier.NVME)) * each  # off the device, and held
    if runs is OptimizerTiming.NEXT_FORWARD:
        forward += each + update_requests(p, windows)
    if p.updated_twice:
        backward += each + repeated_requests(p, windows)
    return forward, backward
