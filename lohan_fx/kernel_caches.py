"""kernel_caches: what oneDNN keeps of kernels that it has compiled for sizes of 16-bit matmuls on a CPU.

Some 0.7 MB for each kernel, three for each matrix and number of tokens, up to 1,024 in each of two caches: batches of many
lengths would fill more than a gigabyte, of memory that is promised (docs/0048).
"""

from __future__ import annotations

import os

CAPACITY = 64
"""More than a step of one length has of different ones in most models; with too few of them a step takes 4% longer."""
_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit() -> None:
    """Unless the user has said otherwise, and as far as nothing has been multiplied yet: both are read at the first time."""
    for variable in _VARIABLES:
        os.environ.setdefault(variable, str(CAPACITY))
