"""Equal layers are found, and nothing else is taken for equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.reporting.fold import Group, fold, relative_name
from lohan_fx.reporting.listing import Block, Line, Name, Part, Read, block_of

LAYERS = "model.layers."


def line(name: str, *parts: Part, layer: int | None = None, is_input: bool = False, is_start: bool = False) -> Line:
    block = None if layer is None else Block(LAYERS, layer)
    path = "" if block is None else str(block)
    return Line(name, "f32[2]", parts, path, block, is_input, is_start, (), 0, 0, "compute")


def repeats(groups: list[Group]) -> list[tuple[str, int]]:
    return [(str(group.block), group.repeats) for group in groups]


def stack(*kinds: str, mask_from: int | None = None) -> list[Line]:
    """A mask, then one layer per letter: an op named like the letter that reads the layer before, and one more."""
    lines = [line("mask", "mask()")]
    for layer, kind in enumerate(kinds):
        mask = 0 if mask_from is None or layer != mask_from else len(lines) - 2
        lines.append(line(f"mul_{layer}", f"{kind}(", Read(len(lines) - 1), Read(mask), ")", layer=layer))
        lines.append(line(f"add_{layer}", "add(", Read(len(lines) - 1), ")", layer=layer))
    return lines


def test_equal_layers_are_one_group() -> None:
    groups = fold(stack(*"aaaa"))
    # The first layer reads the mask where the others read the layer before.
    assert repeats(groups) == [("None", 1), ("model.layers.0", 1), ("model.layers.1", 3)]
    assert groups[-1].numbers == (1, 2, 3)


def test_layers_that_differ_stay_apart() -> None:
    assert repeats(fold(stack(*"aabaac")))[1:] == [
        ("model.layers.0", 1),
        ("model.layers.1", 1),
        ("model.layers.2", 1),
        ("model.layers.3", 2),
        ("model.layers.5", 1),
    ]


def test_two_kinds_in_turns_are_one_group() -> None:
    groups = fold(stack(*"abababab"))
    assert repeats(groups) == [("None", 1), ("model.layers.0", 1), ("model.layers.1", 3), ("model.layers.7", 1)]
    assert len(groups[2].segments) == 2
    assert groups[2].numbers == (1, 3, 5)


def test_a_layer_that_reads_something_else_stays_apart() -> None:
    """Layer 3 reads a line of layer 2 in place of the mask: the listing would look the same but for that name."""
    assert repeats(fold(stack(*"aaaaaa", mask_from=3)))[2:] == [
        ("model.layers.1", 2),
        ("model.layers.3", 1),
        ("model.layers.4", 2),
    ]


def test_reading_one_line_and_reading_the_layer_before_are_not_mixed() -> None:
    """Layers 2 and 3 read layer 1; to layer 2 that is also the layer before, as for layers 4 and 5."""
    lines = stack(*"aa")
    for layer, source in ((2, 4), (3, 4), (4, 6), (5, 7)):
        lines.append(line(f"add_{layer}", "add(", Read(source), ")", layer=layer))
    assert repeats(fold(lines))[3:] == [("model.layers.2", 2), ("model.layers.4", 2)]


def test_backward_layers_count_down() -> None:
    lines = [line("saved", "saved()", is_input=True, layer=n) for n in range(4)]
    lines += [line(f"g_{n}", "mm(", Read(n), ")", layer=n) for n in reversed(range(4))]
    groups = fold(lines)
    assert [group.numbers for group in groups] == [(0, 1, 2, 3), (3, 2, 1, 0)]
    assert groups[0].segments[0].is_input


def test_a_layer_that_reads_what_another_layer_saved_stays_apart() -> None:
    lines = [line("saved", "saved()", is_input=True, layer=n) for n in range(4)]
    lines += [line(f"g_{n}", "mm(", Read(2 if n == 1 else n), ")", layer=n) for n in reversed(range(4))]
    assert [group.numbers for group in fold(lines)[1:]] == [(3, 2), (1,), (0,)]


def fetching(homes: str, *, distance: int = 1) -> list[Line]:
    """One layer per letter, which starts the fetch for the layer after it, from a home that the letter names."""
    return [
        new
        for layer, home in enumerate(homes)
        for new in (
            line(f"mm_{layer}", "mm()", layer=layer),
            line(
                f"fetch_{layer + distance}",
                "fetch(",
                Name(f"{LAYERS}{layer + distance}.weight"),
                f" <- {home})",
                layer=layer + distance,
                is_start=True,
            ),
        )
    ]


def test_a_hoisted_fetch_belongs_to_where_it_stands_and_counts_from_there() -> None:
    lines = fetching("nnnn")
    assert repeats(fold(lines)) == [("model.layers.0", 4)]
    lines[-1] = line("fetch_norm", "fetch(", Name("model.norm.weight"), " <- n)", is_start=True)
    assert repeats(fold(lines)) == [("model.layers.0", 3), ("model.layers.3", 1)]


def test_parameters_from_different_homes_are_not_equal() -> None:
    assert repeats(fold(fetching("ddnnn"))) == [("model.layers.0", 2), ("model.layers.2", 3)]


def test_recomputed_ops_are_not_taken_for_saved_ones() -> None:
    lines = [line(f"{prefix}mm_{n}", "mm()", layer=n) for n, prefix in enumerate(("", "", "recompute_", "recompute_"))]
    assert repeats(fold(lines)) == [("model.layers.0", 2), ("model.layers.2", 2)]


def test_types_count() -> None:
    lines = [line(f"mm_{n}", "mm()", layer=n) for n in range(2)]
    other = Line("mm", "bf16[2]", ("mm()",), "", Block(LAYERS, 2), False, False, (), 0, 0, "compute")
    assert repeats(fold([*lines, other])) == [("model.layers.0", 2), ("model.layers.2", 1)]


def test_layers_of_two_stacks_are_not_equal() -> None:
    encoder = [Line("mm", "f32[2]", ("mm()",), "", Block("encoder.", n), False, False, (), 0, 0, "") for n in range(2)]
    decoder = [Line("mm", "f32[2]", ("mm()",), "", Block("decoder.", n), False, False, (), 0, 0, "") for n in range(2)]
    assert repeats(fold([*encoder, *decoder])) == [("encoder.0", 2), ("decoder.0", 2)]


def test_layers_out_of_step_are_not_equal() -> None:
    lines = [line(f"mm_{n}", "mm()", layer=n) for n in (0, 1, 3, 5)]
    assert [group.numbers for group in fold(lines)] == [(0, 1), (3, 5)]


def test_unfold_shows_each_layer() -> None:
    assert [group.repeats for group in fold(stack(*"aaaa"), unfold=True)] == [1] * 5


@given(st.lists(st.sampled_from("abc"), max_size=12), st.booleans())
def test_groups_cover_the_lines_in_order(kinds: list[str], unfold: bool) -> None:
    """And the lines that a group hides are, letter by letter, those that it shows."""
    lines, next_line = stack(*kinds), 0
    for group in fold(lines, unfold=unfold):
        start, stop = group.segments[0].start, group.segments[-1].stop
        assert start == next_line
        shown = [part.parts[0] for part in lines[start:stop]]
        next_line = start + (stop - start) * group.repeats
        assert [part.parts[0] for part in lines[start:next_line]] == shown * group.repeats
    assert next_line == len(lines)


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefix", "number", "rest"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.", 3, ".mlp.up_proj.weight"),
        ("model.layers.3", "model.layers.", 3, ""),
        ("0.weight", "", 0, ".weight"),
        ("h.1.experts.7.w", "h.", 1, ".experts.7.w"),
        ("layer1.0.conv2.weight", "layer1.", 0, ".conv2.weight"),
    ],
)
def test_the_block_of_a_name(name: str, prefix: str, number: int, rest: str) -> None:
    assert block_of(name) == (Block(prefix, number), rest)


@pytest.mark.parametrize("name", ["", "lm_head.weight", "fc1.weight", "model.norm2", "x.1a.b"])
def test_names_outside_of_blocks(name: str) -> None:
    assert block_of(name) is None


def test_relative_names() -> None:
    assert relative_name("model.layers.5.w", Block(LAYERS, 4)) == (LAYERS, 1, ".w")
    assert relative_name("model.layers.5.w", None) == "model.layers.5.w"
    assert relative_name("encoder.5.w", Block(LAYERS, 4)) == "encoder.5.w"
    assert relative_name("model.norm.w", Block(LAYERS, 4)) == "model.norm.w"
