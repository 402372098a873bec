"""``lohan-fx fsck`` and ``export`` on a checkpoint of a real training, whole and damaged."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lohan_fx
from lohan_fx.commands.cli import main
from lohan_fx.errors import StoreError
from lohan_fx.runtime.file_backend import LOCK_NAME, lock_directory, unlock_directory
from lohan_fx.runtime.generation_files import CHECKPOINTS, generation_path, read_generations
from lohan_fx.runtime.store_file import STORE_NAME
from lohan_fx.runtime.stored_extents import StoredExtents
from tests.tiny import Tiny, batch, profile

Weights = dict[str, torch.Tensor]


@pytest.fixture
def checkpointed(tmp_path: Path) -> Iterator[tuple[list[Path], Weights]]:
    """The directories of a run that has made two checkpoints and ended, and the weights of the last."""
    directories = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for directory in directories:
        directory.mkdir()
    model = Tiny()
    model.register_buffer("seen", torch.arange(5))
    model.layers[0].weight.requires_grad = False
    lohan_fx.compile(
        model, profile(), nvme=directories, host_memory="2GiB", compute_dtype=torch.bfloat16, checkpoints=2
    )
    optimizer = lohan_fx.AdamW(model.parameters(), lr=0.01)
    for seed in range(2):
        model(batch(seed).bfloat16()).backward()
        optimizer.step()
        lohan_fx.checkpoint(model, optimizer)
    weights = dict(model.state_dict())
    lohan_fx.release(model)
    yield directories, weights
    for directory in directories:
        shutil.rmtree(directory)


def damage(directories: list[Path], name: str) -> None:
    record = read_generations(directories)[-1].extents[name]
    piece = record.slots[record.current[0]][0]
    with (directories[piece.file_index] / STORE_NAME).open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", piece.file_offset_bytes + 7)


def arguments(command: str, directories: list[Path], *more: str) -> list[str]:
    return [command, *map(str, directories), *more]


def test_a_whole_checkpoint(checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str]) -> None:
    directories, _ = checkpointed
    before = {path: path.read_bytes() for path in directories[0].parent.rglob("*") if path.is_file()}
    assert main(arguments("fsck", directories)) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["checkpoint 1 (after step 1)", "checkpoint 2 (after step 2)"]
    assert all("chunks are whole" in line for line in told)
    assert {path: path.read_bytes() for path in directories[0].parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("refused", [False, True])
def test_the_drive_is_read_and_not_the_page_cache(
    refused: bool,
    checkpointed: tuple[list[Path], Weights],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the file system can do that."""
    flags: list[int] = []
    really = os.open

    def opened(path: Path, how: int, *args: Any, **options: Any) -> int:
        if str(path).endswith(STORE_NAME):
            flags.append(how)
            if refused and how & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, how, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    assert main(arguments("fsck", checkpointed[0])) == 0
    assert "chunks are whole" in capsys.readouterr().out
    directly = [bool(how & os.O_DIRECT) for how in flags]
    assert directly == ([True, False] * 2 if refused else [True] * 2)


def test_damage_is_named_and_so_is_what_is_left(
    checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directories, _ = checkpointed
    damage(directories, "layers.1.weight:master")
    assert main(arguments("fsck", directories)) == 1
    told = capsys.readouterr().out
    assert "checkpoint 2: chunk 0 of 'layers.1.weight:master' (" in told
    assert "checkpoint 1 is whole" in told
    assert main(arguments("export", directories, "--output", str(tmp_path / "out"))) == 1
    assert "layers.1.weight:master' is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvme0", "nvme1"]


@pytest.mark.parametrize(("number", "told", "exported"), [
    (1, "checkpoint 2, the newest, is whole", True),
    (2, "checkpoint 1 is whole: move the files of later ones away", False),
])  # fmt: skip
def test_a_damaged_manifest_does_not_hide_the_other_checkpoint(
    checkpointed: tuple[list[Path], Weights],
    number: int,
    told: str,
    exported: bool,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    directories, _ = checkpointed
    path = generation_path(directories[0], number)
    path.write_bytes(path.read_bytes()[:-1])
    assert main(arguments("fsck", directories)) == 1
    lines = capsys.readouterr().out
    assert f"checkpoint {number}: {path} is damaged" in lines
    assert f"checkpoint {3 - number} (after step {3 - number}): " in lines and "chunks are whole" in lines
    assert told in lines
    output = tmp_path / "out"
    assert main(arguments("export", directories, "--output", str(output))) == (0 if exported else 1)
    assert output.exists() is exported
    assert exported or f"{path} is damaged" in capsys.readouterr().err
    output.unlink(missing_ok=True)


def test_buffers_that_safetensors_cannot_hold_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvme, output = tmp_path / "nvme", tmp_path / "out"
    nvme.mkdir()
    for dtype, good in ((torch.complex64, True), (torch.complex128, False)):
        model = Tiny()
        model.register_buffer("rotary", torch.arange(3).to(dtype) * 1j)
        with lohan_fx.releasing(lohan_fx.compile(model, profile(), nvme=nvme, compute_dtype=torch.float32)):
            optimizer = lohan_fx.AdamW(model.parameters(), lr=0.01)
            model(batch(0)).backward()
            optimizer.step()
            lohan_fx.checkpoint(model, optimizer)
        assert main(arguments("export", [nvme], "--output", str(output))) == (0 if good else 1)
        if good:
            assert torch.equal(load_file(output)["rotary"], model.rotary)
            output.unlink()
        else:
            assert "'rotary' is of complex128, which safetensors cannot hold" in capsys.readouterr().err
        shutil.rmtree(nvme / CHECKPOINTS)
        (nvme / STORE_NAME).unlink()


def test_export_is_the_state_dict(
    checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directories, weights = checkpointed
    for dtype in (None, "bfloat16"):
        output = tmp_path / "model.safetensors"
        assert (
            main(arguments("export", directories, "--output", str(output), *(["--dtype", dtype] if dtype else []))) == 0
        )
        assert f"{output.stat().st_size:,} bytes" in capsys.readouterr().out
        found = load_file(output)
        assert found.keys() == weights.keys()
        for name, value in found.items():
            expected = weights[name] if dtype is None or name == "seen" else weights[name].bfloat16()
            assert torch.equal(value, expected), name
        output.unlink()


def test_what_is_no_file_is_not_replaced_by_an_export(
    checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Such as a pipe, or a device."""
    directories, _ = checkpointed
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(arguments("export", directories, "--output", str(pipe))) == 1
    assert f"{pipe} is no file" in capsys.readouterr().err
    assert pipe.is_fifo()
    pipe.unlink()


def test_an_export_replaces_no_file_of_a_checkpoint(
    checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    directories, _ = checkpointed
    for output in (directories[1] / STORE_NAME, generation_path(directories[0], 1)):
        assert main(arguments("export", directories, "--output", str(output))) == 1
        assert "the files of a checkpoint" in capsys.readouterr().err
    assert main(arguments("fsck", directories)) == 0


def test_an_export_that_cannot_be_written_says_where(
    checkpointed: tuple[list[Path], Weights],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    output = tmp_path / "model.safetensors"
    assert main(arguments("export", checkpointed[0], "--output", str(output))) == 1
    assert f"writing {output} failed: No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvme0", "nvme1"]


def test_an_export_is_synced_to_its_end(
    checkpointed: tuple[list[Path], Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has its name; the last of it is small, and may still be in Python's buffer."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    output = tmp_path / "model.safetensors"
    assert main(arguments("export", checkpointed[0], "--output", str(output))) == 0
    assert synced == [output.stat().st_size]
    output.unlink()


def test_an_export_minds_no_file_of_one_that_was_killed(
    checkpointed: tuple[list[Path], Weights], tmp_path: Path
) -> None:
    """Also of the same process id, as all have in containers."""
    output = tmp_path / "model.safetensors"
    left = tmp_path / f".model.safetensors.{os.getpid()}.tmp"
    left.touch()
    assert main(arguments("export", checkpointed[0], "--output", str(output))) == 0
    for path in (left, output):
        path.unlink()


def test_an_export_for_which_there_is_no_room_says_so_before_it_writes(
    checkpointed: tuple[list[Path], Weights],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directories, _ = checkpointed
    output = tmp_path / "model.safetensors"
    assert main(arguments("export", directories, "--output", str(output))) == 0
    needed = output.stat().st_size
    output.unlink()
    monkeypatch.setattr(StoredExtents, "read", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    assert main(arguments("export", directories, "--output", str(output))) == 1
    told = capsys.readouterr().err
    assert f"an export of {needed:,} bytes" in told and f"{needed - 1:,} are free" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvme0", "nvme1"]


def test_a_checkpoint_is_read_where_the_disk_is_full(
    checkpointed: tuple[list[Path], Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert main(arguments("fsck", checkpointed[0])) == 0


@pytest.mark.parametrize("left", [None, "by nobody", "by a run"])
def test_a_checkpoint_is_read_where_the_file_system_is_read_only(
    left: str | None,
    checkpointed: tuple[list[Path], Weights],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a failure of the drive; ``left``: a lock file from before that."""
    directories, _ = checkpointed
    path = directories[1] / LOCK_NAME
    held = None if left is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if held is not None and left == "by a run":
        fcntl.flock(held, fcntl.LOCK_EX)
    really = os.open

    def opened(place: Path, how: int, *args: Any, **options: Any) -> int:
        if how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really(place, how, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opened)
        found = main(arguments("fsck", directories))
    told = capsys.readouterr()
    if left == "by a run":
        assert found == 1 and f"{directories[1]} is used by another lohan_fx run" in told.err
    else:
        assert found == 0 and "chunks are whole" in told.out
    assert path.exists() == (left is not None)
    if held is not None:
        os.close(held)
        path.unlink()


def test_directories_in_another_order(
    checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    directories, _ = checkpointed
    said = f"the checkpoints are in {directories[0]}, not in {directories[1]}"
    assert main(arguments("fsck", directories[::-1])) == 1
    assert said in capsys.readouterr().err
    with pytest.raises(StoreError, match=said):
        lohan_fx.compile(Tiny(), profile(), nvme=directories[::-1], resume_from_checkpoint=True)


def test_a_directory_of_something_else_is_named(
    checkpointed: tuple[list[Path], Weights], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directories, _ = checkpointed
    other = tmp_path / "other"
    other.mkdir()
    said = rf"{other} is not directory 1 of the store .* \(there is no {other}/.*\): name the directories of that run"
    assert main(arguments("fsck", [directories[0], other])) == 1
    assert re.search(said, capsys.readouterr().err)
    with pytest.raises(StoreError, match=said):
        lohan_fx.compile(Tiny(), profile(), nvme=[directories[0], other], resume_from_checkpoint=True)


def test_a_running_training_is_left_alone(
    checkpointed: tuple[list[Path], Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    directories, _ = checkpointed
    fd = lock_directory(directories[1])
    try:
        assert main(arguments("fsck", directories)) == 1
        assert f"process {os.getpid()}" in capsys.readouterr().err
        with pytest.raises(StoreError, match=f"process {os.getpid()}"):
            lohan_fx.compile(Tiny(), profile(), nvme=directories, resume_from_checkpoint=True)
    finally:
        unlock_directory(directories[1], fd)


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsck", str(tmp_path)]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert main(["fsck", str(tmp_path / "missing")]) == 1


@pytest.mark.parametrize("command", [["fsck"], ["export", "--output", "w.safetensors"]])
def test_directories_that_cannot_be_those_of_a_run(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, said in (
        ([tmp_path / "none"], f"{tmp_path / 'none'} is no directory"),
        ([tmp_path, tmp_path], "a directory is named twice"),
    ):
        assert main([*command, *map(str, given)]) == 1
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_export_to_a_folder_that_is_not_there(
    checkpointed: tuple[list[Path], Weights], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *map(str, checkpointed[0]), "--output", str(tmp_path / "none" / "w.safetensors")]) == 1
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
