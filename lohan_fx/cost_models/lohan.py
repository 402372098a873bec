"""lohan: LoHan's cost model (Eq. 1 to 5; Ratel's are the same), as printed and corrected.

``LITERAL`` is the paper's, misprints included. ``CORRECTED`` is what ``lohan_fx.cost`` computes: in terms of what a
step really moves. ``OF_A_MODEL`` is the corrected one in the paper's symbols. Corrections (mechanisms B2, c3): swapped
bytes that host memory takes do not reach the SSD (Eq. 3 clamped, c3.1); CPU Adam is a term and so is the traffic of the
host's memory (c3.9); the SSD is no faster than its measured mixture of reads and writes; where the compute device is
the processor, Adam takes its time from the model. Of fill and drain (c3.10) the largest parts are in it: no states move
before the first gradient, and those whose gradients come last move when the backward has ended (``passes.step_ends``).
It is a lower bound still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import sympy

from lohan_fx.cost_models.formula import CostModel, Expression, StageFormula, Term, symbols

ADAM_TOUCHED_BYTES = 32
"""Bytes of host memory that one parameter's update moves: g16, p32, m, v read; p32, m, v, p16 written."""
STATE_BYTES = 12
"""Bytes of fp32 master and two fp32 moments per trained parameter."""


def _literal() -> CostModel:
    flop_f, flop_r, thp, p = symbols("FLOP_f FLOP_r THP_G P")
    a, mem, link, read, write = symbols("A_G2M MEM_avail BW_G BW_S2M BW_M2S")
    to_ssd = a - mem  # Eq. 3: alpha A_G2M, negative where everything fits in main memory
    forward = (
        Term("compute", flop_f / thp),
        Term("d2h", a / link),
        Term("h2d", 2 * p / link),
        Term("ssd", 2 * p / read + to_ssd / write),
    )
    backward = (
        Term("compute", (2 * flop_f + flop_r) / thp),
        Term("d2h", 2 * p / link),
        Term("h2d", (2 * p + a) / link),
        Term("ssd", (14 * p + to_ssd) / read + 14 * p / write),
    )
    return CostModel(
        "LoHan as printed",
        (
            StageFormula("forward", "T_f", forward, "LoHan Eq. 2 with Eq. 3, which is Eq. 4"),
            StageFormula("backward", "T_b", backward, "LoHan Eq. 5"),
        ),
    )


def adam(parameters: Expression, rate: Expression, memory: Expression) -> Expression:
    """Seconds of the CPU's updates: arithmetic, or the traffic of host memory."""
    return sympy.Max(parameters / rate, ADAM_TOUCHED_BYTES * parameters / memory)


def in_turns(read_bytes: Expression, write_bytes: Expression, read: Expression, write: Expression) -> Expression:
    """Seconds of drives that do one thing at a time (L-HW-08)."""
    return read_bytes / read + write_bytes / write


def mixed(
    read_bytes: Expression, write_bytes: Expression, read: Expression, write: Expression, both: Expression
) -> Expression:
    """Seconds of drives that besides lose time by mixing: ``both`` is their rate for reads and writes in equal parts."""
    lost_per_byte = sympy.Max(0, 2 / both - 1 / read - 1 / write)
    return in_turns(read_bytes, write_bytes, read, write) + sympy.Min(read_bytes, write_bytes) * lost_per_byte


def _corrected(
    name: str, of: Callable[[str], Expression], drives: Callable[[Expression, Expression], Expression]
) -> CostModel:
    """``of``: the quantities of ``lohan_fx.cost.Work`` and rates of a ``HardwareProfile`` by name."""
    swapped, swapped_nvme, held = of("swapped_bytes"), of("swapped_nvme_bytes"), of("held_nvme_bytes")
    h2d, d2h = of("h2d_bytes_per_s"), of("d2h_bytes_per_s")
    rates = of("adam_parameters_per_s"), of("host_memory_bytes_per_s")
    per_request, per_byte = of("io_core_s_per_request"), of("io_core_s_per_byte")
    # On a CPU a core that serves a drive, copies or runs Adam is missing to compute, whose other cores wait for it.
    next_held = of("next_held_nvme_bytes")
    read_forward = of("fetched_forward_nvme_bytes") + of("next_state_read_bytes") + next_held
    written_forward = swapped_nvme + of("next_state_write_bytes")
    served_forward = per_request * of("forward_requests") + per_byte * (read_forward + written_forward)
    next_adam_s = adam(of("next_adam_parameters"), *rates)

    def interpreter_s(stage: str) -> Expression:
        """Beside a GPU, of one thread at a time: the one that launches kernels, or a lane's."""
        launched = of("op_overhead_s") * of(f"{stage}_launches")
        return launched + of("interpreter_s_per_job") * of(f"{stage}_jobs")

    def one_core_s(parameters: Expression) -> Expression:
        """What Adam by a lane's one thread takes longer than by all cores."""
        return of("cores_beside_adam") * parameters / of("adam_parameters_per_s")

    forward = (
        Term(
            "compute",
            of("forward_s")
            + drives(of("first_fetched_nvme_bytes"), sympy.Integer(0))
            + of("adam_on_device") * (swapped / d2h + next_adam_s)
            + one_core_s(of("next_adam_parameters"))
            + served_forward,
        ),
        Term("h2d", of("fetched_forward_bytes") / h2d),
        Term("d2h", swapped / d2h),
        Term("ssd", drives(read_forward, written_forward)),
        Term("fetches", of("behind_fetches_s") + drives(of("fetches_read_bytes"), of("fetches_written_bytes"))),
        Term(
            "cpu",
            next_adam_s
            + of("next_returned_bytes") / h2d
            + drives(of("next_serial_read_bytes"), of("next_serial_write_bytes")),
        ),
        Term("python", interpreter_s("forward")),
    )
    repeated, repeated_held = of("repeated_state_bytes"), of("repeated_held_nvme_bytes")
    adam_s = adam(of("adam_parameters") + repeated / STATE_BYTES, *rates)
    read = of("fetched_backward_nvme_bytes") + swapped_nvme + of("state_read_bytes") + repeated + repeated_held
    written = of("state_write_bytes") + repeated + held + next_held
    served = per_request * of("backward_requests") + per_byte * (read + written)
    blocking_read, blocking_written = of("blocking_read_bytes"), of("blocking_write_bytes")
    # While compute waits for an update, nothing is taken from it by that.
    blocking_adam_s = of("adam_on_device") * adam(of("blocking_by_lane"), *rates)
    blocking_served = (
        per_byte * (blocking_read + blocking_written) + blocking_adam_s + one_core_s(of("blocking_by_lane"))
    )
    backward = (
        Term(
            "compute",
            of("backward_s")
            + of("recompute_s")
            + of("coming_back_s")
            + of("adam_on_device") * adam_s
            + one_core_s(of("by_lane"))
            + one_core_s(of("repeated_state_bytes") / STATE_BYTES)
            + served
            + sympy.Max(0, drives(blocking_read, blocking_written) - of("blocking_hidden_s") - blocking_served),
        ),
        Term("h2d", (of("fetched_backward_bytes") + swapped) / h2d),
        Term("d2h", of("gradient_bytes") / d2h),
        Term("ssd", drives(read, written)),
        Term(
            "cpu",
            adam_s + of("returned_bytes") / h2d + drives(of("serial_read_bytes"), of("serial_write_bytes")),
        ),
        Term(
            "updates",
            of("before_updates_s") + drives(of("updates_read_bytes"), of("updates_written_bytes")),
        ),
        Term("python", interpreter_s("backward")),
    )
    late_adam_s = adam(of("late_adam_parameters"), *rates)
    late_serial_s = drives(of("late_serial_read_bytes"), of("late_serial_write_bytes"))
    optimizer = (
        Term("ssd", drives(of("late_state_read_bytes") + held, of("late_state_write_bytes"))),
        Term(
            "cpu",
            late_adam_s + of("late_returned_bytes") / h2d + one_core_s(of("late_by_lane")) + late_serial_s,
        ),
    )
    return CostModel(
        name,
        (
            StageFormula("forward", "T_f", forward, "LoHan Eq. 4, Eq. 3 clamped"),
            StageFormula("backward", "T_b", backward, "LoHan Eq. 5; CPU: Fuyou Eq. 5; naive: LoHan sec. IV-C"),
            StageFormula("optimizer", "T_o", optimizer, "of the last gradients; of all: LoHan fig. 7, +ZeRO"),
        ),
    )


def _of_work() -> CostModel:
    rates = symbols("ssd_read_bytes_per_s ssd_write_bytes_per_s ssd_mixed_bytes_per_s")
    return _corrected("LoHan corrected", symbols, lambda read, write: mixed(read, write, *rates))


def _of_a_model() -> CostModel:
    """The corrected model of a step that streams everything: 2P in per stage, 12P of states in and 14P out."""
    flop_f, flop_r, thp, p, a, mem = symbols("FLOP_f FLOP_r THP_G P A_G2M MEM_avail")
    link, read, write, adam_rate, memory = symbols("BW_G BW_S2M BW_M2S ADAM BW_M")
    quantities = {
        "forward_s": flop_f / thp,
        "backward_s": 2 * flop_f / thp,
        "recompute_s": flop_r / thp,
        **dict.fromkeys(("fetched_forward_bytes", "fetched_forward_nvme_bytes"), 2 * p),
        **dict.fromkeys(("fetched_backward_bytes", "fetched_backward_nvme_bytes", "gradient_bytes"), 2 * p),
        "swapped_bytes": a,
        "swapped_nvme_bytes": sympy.Max(0, a - mem),
        "state_read_bytes": 12 * p,
        "state_write_bytes": 14 * p,
        "adam_parameters": p,
        "fetches_read_bytes": 2 * p,
        "updates_read_bytes": 12 * p,
        "updates_written_bytes": 14 * p,
        **dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), link),
        "adam_parameters_per_s": adam_rate,
        "host_memory_bytes_per_s": memory,
    }
    model = _corrected(
        "LoHan corrected, in its symbols",
        lambda name: quantities.get(name, sympy.Integer(0)),
        # The papers give no rate of reads and writes mixed.
        lambda read_bytes, write_bytes: in_turns(read_bytes, write_bytes, read, write),
    )
    # Nor do they count what an interpreter takes.
    stages = [replace(s, terms=tuple(t for t in s.terms if t.lane != "python")) for s in model.stages[:2]]
    return CostModel(model.name, tuple(stages))


def _drives() -> CostModel:
    names = "read_bytes write_bytes ssd_read_bytes_per_s ssd_write_bytes_per_s ssd_mixed_bytes_per_s"
    stage = StageFormula("transfer", "T_S", (Term("ssd", mixed(*symbols(names))),), "LoHan sec. IV-D")
    return CostModel("Drives", (stage,))


LITERAL: CostModel = _literal()
CORRECTED: CostModel = _of_work()
OF_A_MODEL: CostModel = _of_a_model()
DRIVES: CostModel = _drives()
