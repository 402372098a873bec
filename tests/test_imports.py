"""The folders' rules: what imports what and under which name, who touches ``node.meta``, what files are called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lohan_fx", "passes", "runtime", "tests", "examples", "benchmarks")

# What of lohan_fx each folder may import, beside itself.
ALLOWED = {
    "passes": {"cost", "errors", "meta", "ops", "plan"},
    "runtime": {"errors", "hardware", "ops", "plan"},
}
# Third parties that a folder must not know.
FORBIDDEN = {"passes": (), "runtime": ("torch.fx",)}

SAYS_NOTHING = {"base", "common", "helper", "helpers", "misc", "util", "utils"}

OUR_META_KEY = re.compile(
    r"""\bmeta \s* (?: \[ | \.(?:get|pop|setdefault)\( ) \s* f?["']lohan"""  # node.meta["lohan...
    r"""| ["']lohan[\w.]*["'] \s+ (?:not\s+)? in \s+ [\w.]*\bmeta\b""",  # "lohan..." in node.meta
    re.VERBOSE,
)


def sources(*folders: str) -> list[Path]:
    # rglob does not follow links, so lohan_fx/passes is not read a second time.
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of all that `source`, a module of `package`, imports; ``torch.fx`` counts as written, too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names, level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                yield from (".".join([*parents, *([module] if module else []), alias.name]) for alias in names)
            case ast.Attribute(ast.Name("torch"), attribute):
                yield f"torch.{attribute}"


def inside(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def forbidden_imports(source: str, folder: str) -> list[str]:
    own = f"lohan_fx.{folder}"
    allowed = [own, *(f"lohan_fx.{module}" for module in ALLOWED[folder])]
    return [
        name
        for name in imported(source, own)
        if (inside(name, "lohan_fx") and not any(inside(name, package) for package in allowed))
        or any(inside(name, package) for package in FORBIDDEN[folder])
    ]


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_folder_refuses_any_other_name(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"import lohan_fx.{name}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("folder", ["passes", "runtime"])
def test_imports_go_one_way(folder: str) -> None:
    wrong = {relative(path): forbidden_imports(path.read_text(), folder) for path in sources(folder)}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("folder", "source", "wrong"),
    [
        ("passes", "import lohan_fx.runtime", ["lohan_fx.runtime"]),
        ("passes", "from lohan_fx.runtime import lanes", ["lohan_fx.runtime.lanes"]),
        ("passes", "def f():\n    from lohan_fx import runtime, plan", ["lohan_fx.runtime"]),
        ("passes", "from ..runtime import lanes", ["lohan_fx.runtime.lanes"]),
        ("passes", "from lohan_fx.hardware import HardwareProfile", ["lohan_fx.hardware.HardwareProfile"]),
        ("passes", "import lohan_fx", ["lohan_fx"]),
        ("passes", "import torch.fx, sympy\nfrom lohan_fx.cost import eq1\nfrom . import annotate", []),
        ("runtime", "from lohan_fx.passes.annotate import annotate", ["lohan_fx.passes.annotate.annotate"]),
        ("runtime", "from lohan_fx import meta", ["lohan_fx.meta"]),
        ("runtime", "import torch.fx.graph", ["torch.fx.graph"]),
        ("runtime", "from torch import fx", ["torch.fx"]),
        ("runtime", "import torch\ntorch.fx.Graph()", ["torch.fx"]),
        ("runtime", "import os, torch\nfrom lohan_fx.hardware import x\nfrom .store import y\ntorch.fxs", []),
    ],
)
def test_import_rule_tells_right_from_wrong(folder: str, source: str, wrong: list[str]) -> None:
    assert forbidden_imports(source, folder) == wrong


def test_only_meta_touches_our_node_meta_keys() -> None:
    users = [relative(path) for path in sources(*FOLDERS) if OUR_META_KEY.search(path.read_text())]
    assert [path for path in users if path not in ("lohan_fx/meta.py", relative(Path(__file__)))] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('node.meta["lohan.cost"] = 1', True),
        ("n.meta.get('lohan_layer')", True),
        ('if "lohan.cost" not in node.meta:', True),
        ('node.meta["val"]', False),
        ('LIBRARY = "lohan"', False),
    ],
)
def test_meta_rule_tells_right_from_wrong(source: str, found: bool) -> None:
    assert bool(OUR_META_KEY.search(source)) is found


def test_file_names_say_something() -> None:
    assert [relative(path) for path in sources(*FOLDERS) if path.stem in SAYS_NOTHING] == []
