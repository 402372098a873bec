"""workspace: one graph at a time, resident when used, and gone when given back."""

from __future__ import annotations

import threading

import torch

from lohan_fx.process_memory import resident_bytes
from lohan_fx.runtime.workspace import Workspace

MIB = 1 << 20


def test_one_borrower_at_a_time() -> None:
    workspace = Workspace()
    with workspace.borrowed(MIB) as memory:
        assert memory is not None and memory.numel() == MIB and memory.dtype is torch.uint8
        with workspace.borrowed(MIB) as second:
            assert second is None
        beside: list[object] = []

        def borrow() -> None:
            with workspace.borrowed(MIB) as third:
                beside.append(third)

        thread = threading.Thread(target=borrow)
        thread.start()
        thread.join(10)
        assert beside == [None]
    with workspace.borrowed(MIB) as again:
        assert again is memory


def test_it_is_handed_on_after_an_error() -> None:
    workspace = Workspace()
    try:
        with workspace.borrowed(MIB):
            raise RuntimeError
    except RuntimeError:
        pass
    with workspace.borrowed(MIB) as memory:
        assert memory is not None


def test_all_of_it_is_resident_until_it_is_given_back() -> None:
    workspace = Workspace()
    with workspace.borrowed(5 * MIB) as memory:
        assert memory is not None
        workspace.give_back()  # a graph has it: nothing happens
        address, nbytes = workspace.place()
        assert nbytes == 5 * MIB and resident_bytes(address, nbytes) == nbytes
    workspace.give_back()
    assert workspace.place() == (0, 0)
    assert resident_bytes(address, nbytes) == 0
    assert not memory.any()  # what still views it is safe, and reads zeros
    with workspace.borrowed(MIB) as again:
        assert again is not None


def test_another_size_takes_the_place_of_the_one_before() -> None:
    workspace = Workspace()
    with workspace.borrowed(4 * MIB) as first:
        assert first is not None
        address, nbytes = workspace.place()
    with workspace.borrowed(2 * MIB) as second:
        assert second is not None and second.numel() == 2 * MIB
    assert resident_bytes(address, nbytes) < nbytes or second.data_ptr() == first.data_ptr()


def test_made_in_inference_mode_it_serves_training() -> None:
    workspace = Workspace()
    with torch.inference_mode(), workspace.borrowed(MIB) as memory:
        assert memory is not None and not memory.is_inference()


def test_nothing_takes_nothing() -> None:
    workspace = Workspace()
    for _ in range(2):
        with workspace.borrowed(0) as memory:
            assert memory is not None and memory.numel() == 0
    assert workspace.place() == (0, 0)
