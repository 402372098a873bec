"""Golden texts: what is printed is compared with ``tests/golden/NAME.txt``.

After a change that is meant, ``LOHAN_UPDATE_GOLDEN=1 python -m pytest tests/lohan_fx`` writes them again; read the
diff before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def check_golden() -> Callable[[str, str], None]:
    """``check_golden(name, text)`` fails where ``text`` is not what the golden file says."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("LOHAN_UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: set LOHAN_UPDATE_GOLDEN=1 to write it"
        assert text == path.read_text(encoding="utf-8"), "if this is meant, set LOHAN_UPDATE_GOLDEN=1 to write it again"

    return check
