"""captured_graphs: the graphs that a model has by now, one pair for each shape and way of calling it, and what they share."""

from __future__ import annotations

from lohan_fx.passes.halves import Halves
from lohan_fx.passes.symbolic_sizes import is_symbolic
from lohan_fx.plan import ParameterPlan, Plan
from lohan_fx.planning.budgets import captured_again_bytes, staging_bytes
from lohan_fx.planning.expected_peak import added_bytes, transit_of
from lohan_fx.planning.memory_model import at_home_bytes, resident_bytes
from lohan_fx.request import Request


class CapturedGraphs:
    """``plans[i]`` is that of ``halves[i]``, the oldest first. All of them may run again, and memory holds all of them, while the
    parameters are where the newest plan has them.

    ``left_bytes``: what graphs that were forgotten have left. Their objects were freed, but they had lain among others that live,
    so that the memory is there for what is captured next.
    """

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.halves: list[Halves] = []
        self.left_bytes = 0
        self._added_bytes: list[int] = []

    def add(self, halves: Halves, plan: Plan) -> None:
        self.plans.append(plan)
        self.halves.append(halves)

    def training(self) -> list[int]:
        """Which of ``halves`` train."""
        return [index for index, halves in enumerate(self.halves) if halves.backward is not None]

    def main(self) -> int | None:
        """Which one stands for the model where none is named: the last that trains, or the last if none does; one of the whole
        model, or, where only parts of it were called (docs/0046), of a part. None before the first."""
        halves = self.halves
        return max(
            range(len(halves)), key=lambda i: (halves[i].backward is not None, not halves[i].module, i), default=None
        )

    def forget_training(self, before: int | None = None) -> None:
        """All graphs that train, or those of them that were there before there were so many."""
        for index in reversed([index for index in self.training() if before is None or index < before]):
            del self.plans[index], self.halves[index], self._added_bytes[index : index + 1]

    def added_bytes(self, request: Request, drives: int) -> list[int]:
        """What each of ``halves`` adds to the process's memory (``expected_peak``)."""
        new = slice(len(self._added_bytes), None)
        for plan, halves in zip(self.plans[new], self.halves[new], strict=True):
            transit = transit_of(halves, plan, request)
            self._added_bytes.append(added_bytes(plan, halves, transit, drives=drives))
        return self._added_bytes

    def others_bytes(self, request: Request, before: int | None = None) -> int:
        """What captures leave in memory beside the first one, which ``request`` counts; with ``before``, what those had left
        that came before ``halves[before]``."""
        trained = [self.halves[index] for index in self.training() if before is None or index < before]
        counted = sum(captured_again_bytes(len(o.parameters), symbolic=is_symbolic(o.forward)) for o in trained)
        return max(counted, self.left_bytes - _first_bytes(request))

    def captured_bytes(self, request: Request) -> int:
        """What all captures are counted with, and one more."""
        return _first_bytes(request) + self.others_bytes(request)

    def have_left(self, now_bytes: int, most_bytes: int) -> None:
        """Graphs are forgotten, and the process has ``now_bytes`` that no plan names: what they have left, but for what is the
        caller's own. They had taken no more than ``most_bytes``, or what is left of others."""
        self.left_bytes = max(0, min(now_bytes, max(most_bytes, self.left_bytes)))

    def least_homes(self) -> tuple[ParameterPlan, ...]:
        """Where the training plan that keeps least in memory has the parameters; empty without any."""
        trained = [self.plans[index] for index in self.training()]
        return min(trained, key=lambda plan: sum(resident_bytes(plan))).parameters if trained else ()

    def most_at_home_bytes(self, request: Request) -> int | None:
        """The most that one more plan may keep in host memory for good (a CPU's is device memory, too): beside what the graphs
        of each plan so far need at work, and one more capture. None before the first."""
        now = self.others_bytes(request)
        rest = [
            plan.host_memory_bytes
            - (plan.prediction.peak_bytes["host"] - at_home_bytes(plan)[-1])
            - (now - self.others_bytes(request, before=index))
            for index, plan in enumerate(self.plans)
            if plan.prediction is not None
        ]
        return min(rest, default=None)


def _first_bytes(request: Request) -> int:
    """What ``request`` counts for the first capture."""
    return request.budgets.fixed_bytes - staging_bytes(request.windows, shared=request.budgets.shared)
