"""kernel_caches: the limit is a default."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lohan_fx import kernel_caches

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
GROWTH = """
import lohan_fx, torch

def resident_bytes():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))

weight = torch.randn(512, 512, dtype=torch.bfloat16)
for rows in (64, *range(1, 260)):
    if rows == 60:
        before = resident_bytes()
    torch.randn(rows, 512, dtype=torch.bfloat16) @ weight
print(resident_bytes() - before)
"""


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[0], "7")
    monkeypatch.delenv(VARIABLES[1], raising=False)
    kernel_caches.limit()
    assert [os.environ[name] for name in VARIABLES] == ["7", str(kernel_caches.CAPACITY)]


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no kernels for bfloat16"
)
def test_kernels_for_many_sizes_do_not_pile_up() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    run = subprocess.run([sys.executable, "-c", GROWTH], env=environment, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 << 20
