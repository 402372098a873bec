"""What a checkpoint holds of a training comes back as it was; what no training wrote is refused."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
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


def test_views_of_other_tensors_come_back() -> None:
    """A single element keeps the stride that it had; conjugation and sign may be only noted."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    for view in (torch.rand(3, 4)[1:2, 2], value[::2], value.conj(), value.conj().imag, torch._neg_view(torch.ones(2))):
        assert torch.equal(decoded(encoded(view, "it")), view)


def test_the_state_of_numpys_generator_comes_back() -> None:
    expected = np.random.RandomState(5)
    again = np.random.RandomState(6)
    again.set_state(decoded(json.loads(json.dumps(encoded(expected.get_state(), "it")))))
    assert again.random() == expected.random()


@pytest.mark.parametrize(
    "array",
    [np.arange(4)[::-1], np.arange(4, dtype=">i4"), np.arange(4, dtype=np.uint16), np.ones((), np.float32)],
)
def test_arrays_of_any_order_are_held(array: Any) -> None:
    again = decoded(json.loads(json.dumps(encoded(array, "it"))))
    assert again.shape == array.shape and again.tolist() == array.tolist()


@pytest.mark.parametrize("inside", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}])
def test_what_is_held_can_be_read_again_however_deep(inside: Callable[[Any], Any]) -> None:
    value, depth = 0, 0
    while True:
        try:
            text = json.dumps(encoded(value, "it"))
        except ValueError as error:
            assert "it contains itself, or is nested too deep" in str(error)
            break
        assert decoded(json.loads(text)) == value
        for _ in range(10):
            value, depth = inside(value), depth + 1
    assert depth > 50


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.array(["a"]), "a ndarray"),
        (np.array([None]), "a ndarray"),
        (np.longdouble(2), "a longdouble"),
        (np.ones(2, np.longdouble), "a ndarray"),
        (torch.empty(2, device="meta"), "on meta"),
        (torch.zeros(2).to(torch.float8_e5m2), "a tensor of torch.float8_e5m2"),
    ],
)
def test_what_is_not_held_is_named(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"extra\.a\[0\] is .*{kind.removeprefix('a ')}.*: a checkpoint holds"):
        encoded({"a": [value]}, "extra")


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
