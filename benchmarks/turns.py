"""turns: measured processes that take turns, a run at a time; the ones whose turn it is not sleep.

A model's promise is about its whole process: two compiled models in one would count against each other's.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "answer: "


def serve(runs: Mapping[str, Callable[[], Any]], said: Any = None, end: Callable[[], Any] = lambda: None) -> None:
    """In the measured process: say that it is ready (and ``said``), run and time what is asked for, a line of stdin each, and
    say what ``end`` returns when nothing more is. Answers are lines of JSON behind ``MARK``: libraries print, too."""

    def seconds(name: str) -> float:
        start_s = time.perf_counter()
        runs[name]()
        return time.perf_counter() - start_s

    answer_each(seconds, said, end)


def answer_each(answer: Callable[[str], Any], said: Any = None, end: Callable[[], Any] = lambda: None) -> None:
    """In the measured process: say that it is ready (and ``said``), what ``answer`` returns for each line of stdin, and what
    ``end`` returns when no more comes."""
    _answer(said)
    for line in sys.stdin:
        _answer(answer(line.strip()))
    _answer(end())


def _answer(found: Any) -> None:
    print(f"{MARK}{json.dumps(found)}", flush=True)


class Ended(SystemExit):
    """A measured process ended without an answer, and so does this one, unless it can do without."""


class Process:
    """A child that serves. ``said``: what it said when it was ready."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._process.kill)  # whatever becomes of us, nothing of ours disturbs the next benchmark
        self.said = self._answer()

    def run(self, name: str) -> float:
        """Its seconds."""
        return float(self.ask(name))

    def ask(self, line: str) -> Any:
        """The answer to ``line``. Raises ``Ended``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> Any:
        """What it says at its end; it is over."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = self._answer()
        self._process.wait()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise Ended(f"a measured process ended with status {self._process.wait()}")
