"""What every test gets: a fixed seed, hypothesis without deadlines, and no GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.exhaustive import DEFAULT_EXAMPLES, examples

MANY_MODULES, FREEZE_EVERY_S = 20, 5.0
_frozen_at_s = time.monotonic()

# pytest gives its handler to loggers that do not propagate, and PyTorch writes whole graphs for any handler of this one.
logging.getLogger("torch.__trace").propagate = True
# Tracing makes many objects that live, and compile() collects by itself.
gc.set_threshold(200_000, 50, 100)

hypothesis.settings.register_profile("local", examples(DEFAULT_EXAMPLES), deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", examples(DEFAULT_EXAMPLES), deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def short_collections() -> Iterator[None]:
    """Compiling a model collects garbage, three times; without this, all that was ever imported, or is kept of earlier tests, is
    looked at each time.

    A test that is itself about what is freed calls ``gc.unfreeze()`` first.
    """
    global _frozen_at_s
    before = len(sys.modules)
    yield
    # Not asked of gc.get_freeze_count(), which walks through all that is frozen: a seventh of all tests' time.
    if time.monotonic() > _frozen_at_s + FREEZE_EVERY_S or len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _frozen_at_s = time.monotonic()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """For a store that stays there when it is closed, as one with checkpoints does; gone before ``leak_check`` looks."""
    made = tmp_path / "nvme"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def leak_check(tmp_path: Path) -> Iterator[None]:
    """Fails the test if it leaves behind a ``lohan-*`` thread, an open file, or a file below ``tmp_path``.

    Name it before fixtures that hold such things, so that they are torn down before it looks.
    """
    before = _threads(), _open_files(), _files_below(tmp_path)
    yield
    after = _threads(), _open_files(), _files_below(tmp_path)
    leaked = [sorted(new - old) for old, new in zip(before, after, strict=True)]
    if any(leaked):
        pytest.fail("left behind: threads {}, open files {}, files {}".format(*leaked))


def _threads() -> set[str]:
    return {f"{t.name} ({t.ident})" for t in threading.enumerate() if t.name.startswith("lohan-")}


def _open_files() -> set[str]:
    """Descriptors of real files; pipes and sockets belong to Inductor's compile workers and stay."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found.add(f"{fd.name} -> {target}")
    return found


def _files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture(autouse=True)
def nothing_expected() -> Iterator[None]:
    """A graph that a test broke on purpose may start what it never waits for; the next test must not inherit it."""
    from lohan_fx import ops

    yield
    ops._expected.arrivals.clear()
