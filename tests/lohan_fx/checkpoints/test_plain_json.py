"""What a checkpoint holds of a training comes back as it was; what no training wrote is refused."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.checkpoints.plain_json import DTYPES, decoded, decoded_tensor, encoded

keys = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)
strange = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["@tensor", "@tuple", "@dict", "@counter", "@", "dtype", "shape", "data", "a"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(value=values)
def test_it_comes_back_as_it_was(value: Any) -> None:
    again = decoded(json.loads(json.dumps(encoded(value, "it"))))
    assert again == value and type(again) is type(value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2, 0), (2, 3)):
        value = torch.randn(shape).to(dtype)
        again = decoded(json.loads(json.dumps(encoded(value, "it"))))
        assert again.dtype is dtype and torch.equal(again, value)


@given(value=strange)
def test_anything_else_is_a_value_error(value: Any) -> None:
    with contextlib.suppress(ValueError):
        decoded(value)


@pytest.mark.parametrize(
    "fields", [{}, {"dtype": "float32", "shape": [0, 2**39, 2**39], "data": ""},
               {"dtype": "float32", "shape": [2], "data": "AAAA"}, {"dtype": "float32", "shape": [-1], "data": ""},
               {"dtype": "object", "shape": [1], "data": ""}, {"dtype": "float32", "shape": [1], "data": "é"}]
)  # fmt: skip
def test_a_tensor_whose_parts_do_not_agree_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        decoded_tensor(fields)


def test_the_key_of_a_dict_must_be_one() -> None:
    with pytest.raises(ValueError, match="cannot be the key of a dict"):
        decoded({"@dict": [[{"@tuple": [[1]]}, 2]]})
