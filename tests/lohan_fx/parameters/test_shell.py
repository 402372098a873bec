"""What may be done to an offloaded parameter outside the compiled model: little, and never at the cost of the process.

All of it runs in a child process, which says after each call what came of it: were one of them to end in a
segmentation fault, the test of that call fails, and the others still run.
"""

from __future__ import annotations

import copy
import io
import json
import operator
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.errors import OffloadedParameterError
from lohan_fx.parameters.shell import Shell, make_shell
from lohan_fx.runtime.host_pool import page_padded_bytes
from tests.tiny import WIDTH, Tiny, batch, profile

Call = Callable[[nn.Module, nn.Parameter], object]
NAME = "layers.0.weight"


def no_grad(call: Call) -> Call:
    return torch.no_grad()(call)


def saved(thing: object) -> None:
    torch.save(thing, io.BytesIO())


READS: dict[str, Call] = {
    "sum": lambda m, p: p.sum(),
    "add": lambda m, p: p + 1,
    "radd": lambda m, p: 1 + p,
    "matmul": lambda m, p: torch.ones(1, WIDTH) @ p,
    "eq": lambda m, p: p == p,
    "abs": lambda m, p: abs(p),
    "equal": lambda m, p: torch.equal(p, p),
    "allclose": lambda m, p: torch.allclose(p, p),
    "isnan": lambda m, p: torch.isnan(p).any(),
    "norm": lambda m, p: torch.linalg.vector_norm(p),
    "einsum": lambda m, p: torch.einsum("ij->", p),
    "keyword": lambda m, p: torch.sum(input=p),
    "aten": lambda m, p: torch.ops.aten.sum.default(p),
    "foreach": lambda m, p: torch._foreach_norm([p, p]),
    "stack": lambda m, p: torch.stack([p, p]),
    "out": lambda m, p: torch.add(torch.ones(WIDTH, WIDTH), p),
    "linear": lambda m, p: nn.functional.linear(torch.ones(1, WIDTH), p),
    "submodule": lambda m, p: m.layers[0].forward(batch()),
    "data": lambda m, p: p.data,
    "detach": lambda m, p: p.detach(),
    "clone": lambda m, p: p.clone(),
    "numpy": lambda m, p: p.numpy(),
    "asarray": lambda m, p: np.asarray(p),
    "array": lambda m, p: np.array(p),
    "tolist": lambda m, p: p.tolist(),
    "item": lambda m, p: p.item(),
    "bool": lambda m, p: bool(p),
    "float": lambda m, p: float(p),
    "int": lambda m, p: int(p),
    "index": lambda m, p: operator.index(p),
    "contains": lambda m, p: 1 in p,
    "iterate": lambda m, p: list(p),
    "reversed": lambda m, p: reversed(p),
    "unpack": lambda m, p: [*p],
    "row": lambda m, p: p[0],
    "T": lambda m, p: p.T,
    "mT": lambda m, p: p.mT,
    "real": lambda m, p: p.real,
    "view": lambda m, p: p.view(-1),
    "reshape": lambda m, p: p.reshape(-1),
    "as_strided": lambda m, p: p.as_strided((1,), (1,)),
    "contiguous": lambda m, p: p.contiguous(),
    "to another dtype": lambda m, p: p.to(torch.float64),
    "to a copy": lambda m, p: p.to("cpu", copy=True),
    "to meta": lambda m, p: p.to("meta"),
    "half": lambda m, p: p.half(),
    "type": lambda m, p: p.type(torch.float64),
    "pin_memory": lambda m, p: p.pin_memory(),
    "data_ptr": lambda m, p: p.data_ptr(),
    "untyped_storage": lambda m, p: p.untyped_storage(),
    "storage": lambda m, p: p.storage(),
    "typed_storage": lambda m, p: p._typed_storage(),
    "share_memory_": lambda m, p: p.share_memory_(),
    "from_dlpack": lambda m, p: torch.from_dlpack(p),
    "numpy from_dlpack": lambda m, p: np.from_dlpack(p),
    "backward": lambda m, p: p.backward(),
    "copy": lambda m, p: copy.copy(p),
    "deepcopy": lambda m, p: copy.deepcopy(p),
    "pickle": lambda m, p: pickle.dumps(p),
    "save": lambda m, p: saved(p),
    "save in a dict": lambda m, p: saved({"weights": [p]}),
    "new Parameter": lambda m, p: nn.Parameter(p),
    "parameters_to_vector": lambda m, p: nn.utils.parameters_to_vector(m.parameters()),
    "model half": lambda m, p: m.half(),
    "model double": lambda m, p: m.double(),
    "model to meta": lambda m, p: m.to("meta"),
    "model to_empty": lambda m, p: m.to_empty(device="cpu"),
    "model share_memory": lambda m, p: m.share_memory(),
    "model deepcopy": lambda m, p: copy.deepcopy(m),
    "model pickle": lambda m, p: pickle.dumps(m),
    "model save": lambda m, p: saved(m),
    "averaged model": lambda m, p: torch.optim.swa_utils.AveragedModel(m),
    "weight_norm": lambda m, p: nn.utils.parametrizations.weight_norm(m.layers[0]),
}

EDITS: dict[str, Call] = {
    "add_": lambda m, p: p.add_(1),
    "add_ without gradients": no_grad(lambda m, p: p.add_(1)),
    "iadd": lambda m, p: operator.iadd(p, 1),
    "copy_": no_grad(lambda m, p: p.copy_(torch.zeros(p.shape))),
    "item assignment": no_grad(lambda m, p: operator.setitem(p, 0, 1)),
    "out=": no_grad(lambda m, p: torch.add(torch.ones(WIDTH, WIDTH), 1, out=p)),
    "foreach": no_grad(lambda m, p: torch._foreach_add_([p], 1)),
    "normal_": lambda m, p: nn.init.normal_(p),
    "zeros_": lambda m, p: nn.init.zeros_(p),
    "xavier_uniform_": lambda m, p: nn.init.xavier_uniform_(p),
    "orthogonal_": lambda m, p: nn.init.orthogonal_(p),
    "reset_parameters": lambda m, p: m.layers[0].reset_parameters(),
    "data =": lambda m, p: setattr(p, "data", torch.zeros(p.shape)),
    "grad =": lambda m, p: setattr(p, "grad", torch.zeros(p.shape)),
    "set_": no_grad(lambda m, p: p.set_(torch.zeros(p.shape))),
    "resize_": lambda m, p: p.resize_(3),
    "vector_to_parameters": lambda m, p: nn.utils.vector_to_parameters(torch.zeros(10_000), m.parameters()),
    "register_hook": lambda m, p: p.register_hook(lambda gradient: gradient),
    "register_post_accumulate_grad_hook": lambda m, p: p.register_post_accumulate_grad_hook(lambda q: None),
}

DESCRIPTION = f"Shell({NAME}, shape=(16, 16), dtype=torch.float32, offloaded)"

HARMLESS: dict[str, tuple[Call, object]] = {
    "repr": (lambda m, p: repr(p), DESCRIPTION),
    "str": (lambda m, p: str(p), DESCRIPTION),
    "f-string": (lambda m, p: f"{p}|{p:>70}|{p!r}", f"{DESCRIPTION}|{DESCRIPTION:>70}|{DESCRIPTION}"),
    "print": (lambda m, p: print(p, file=io.StringIO()), None),
    "print model": (lambda m, p: repr(m), repr(Tiny())),
    "shape": (lambda m, p: tuple(p.shape), (WIDTH, WIDTH)),
    "size": (lambda m, p: [p.size(0), p.dim(), p.ndim, p.numel(), torch.numel(p)], [16, 2, 2, 256, 256]),
    "bytes": (lambda m, p: [p.nbytes, p.element_size(), p.itemsize], [1024, 4, 4]),
    "stride": (lambda m, p: [p.stride(), p.storage_offset(), p.is_contiguous()], [(16, 1), 0, True]),
    "dtype": (lambda m, p: [str(p.dtype), p.is_floating_point(), torch.is_complex(p)], ["torch.float32", True, False]),
    "device": (
        lambda m, p: [str(p.device), p.is_cuda, p.is_cpu, p.is_meta, p.get_device()],
        ["cpu", False, True, False, -1],
    ),
    "autograd": (
        lambda m, p: [p.requires_grad, p.is_leaf, p.grad_fn, p.grad, p.retains_grad],
        [True, True, None, None, False],
    ),
    "len": (lambda m, p: len(p), WIDTH),
    "hash": (lambda m, p: hash(p) == hash(p) and p in {p}, True),
    "identity": (lambda m, p: p in list(m.parameters()) and next(m.parameters()) is p, True),
    "kind": (lambda m, p: isinstance(p, nn.Parameter), True),
    "dir": (lambda m, p: "shape" in dir(p), True),
    "no attribute": (lambda m, p: hasattr(p, "no_such_thing"), False),
    "no gradient": (lambda m, p: setattr(p, "grad", None), None),
    "zeros_like": (lambda m, p: torch.zeros_like(p).sum().item(), 0.0),
    "new_ones": (lambda m, p: [p.new_ones(3).sum().item(), type(p.new_ones(3)).__name__], [3.0, "Tensor"]),
    "to the same": (
        lambda m, p: [p.to("cpu") is p, p.cpu() is p, p.float() is p, p.to(torch.float32) is p],
        [True] * 4,
    ),
    "model to the same": (
        lambda m, p: m.to("cpu").float().cpu().to(torch.float32) is m and p is m.layers[0].weight,
        True,
    ),
    "model sizes": (lambda m, p: sum(q.numel() * q.element_size() for q in m.parameters()), 3264),
    "state_dict": (lambda m, p: torch.isfinite(m.state_dict()[NAME]).all().item(), True),
    "state_dict with keep_vars": (lambda m, p: m.state_dict(keep_vars=True)[NAME] is p, True),
    "functional_call": (
        lambda m, p: torch.func.functional_call(m, dict(m.named_parameters()), (batch(),)).item() == m(batch()).item(),
        True,
    ),
}

CALLS: dict[str, Call] = {
    **{f"read {name}": call for name, call in READS.items()},
    **{f"edit {name}": call for name, call in EDITS.items()},
    **{f"harmless {name}": call for name, (call, _) in HARMLESS.items()},
}


# --- the child ------------------------------------------------------------------------------------------------


def child(names: list[str]) -> None:
    """Call each and print what came of it, the name first, so that the parent knows at which one the process died."""
    with tempfile.TemporaryDirectory() as nvme:
        model = Tiny()
        lohan_fx.compile(model, profile(), nvme=nvme, host_memory="2GiB", compute_dtype=torch.float32)
        loss = model(batch()).item()
        for name in names:
            print(json.dumps(name), flush=True)
            print(json.dumps(outcome(CALLS[name], model)), flush=True)
            assert model(batch()).item() == loss, f"{name} changed the model"
        lohan_fx.release(model)


def outcome(call: Call, model: nn.Module) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {"value": call(model, model.layers[0].weight)}
        json.dumps(found)
    except TypeError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    shell = model.layers[0].weight
    with torch._C.DisableTorchFunctionSubclass():
        found["bytes"] = shell.untyped_storage().nbytes()
    found["intact"] = isinstance(shell, Shell) and shell.requires_grad and shell.dtype == torch.float32
    return found


@cache
def outcomes() -> dict[str, dict[str, Any]]:
    """What came of every call; a call that ended the process is noted, and a new child does the rest."""
    found: dict[str, dict[str, Any]] = {}
    while todo := [name for name in CALLS if name not in found]:
        code = f"from tests.lohan_fx.parameters.test_shell import child; child({todo!r})"
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
        )
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        found.update(zip(lines[::2], lines[1::2], strict=False))
        if ended.returncode:
            died_at = lines[-1] if len(lines) % 2 else "the start"
            found[died_at] = {"died": ended.returncode, "message": ended.stderr[-2000:]}
            assert died_at in CALLS, ended.stderr
    return found


# --- the tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("harmless")])
def test_reading_and_editing_raise(name: str) -> None:
    found = outcomes()[name]
    assert found.get("error") == OffloadedParameterError.__name__, found
    assert ("layers." in found["message"] and "offloaded" in found["message"]) or "gradient of" in found["message"]
    if "gradient of" not in found["message"]:
        for remedy in ("Call the model, or the module", "state_dict()", "lohan_fx.release(model)"):
            assert remedy in found["message"]
    assert found["intact"] and found["bytes"] == 0


@pytest.mark.parametrize("name", HARMLESS)
def test_what_tells_nothing_of_the_values_works(name: str) -> None:
    found = outcomes()[f"harmless {name}"]
    assert found.get("value", found) == json.loads(json.dumps(HARMLESS[name][1]))
    assert found["intact"] and found["bytes"] == 0


def test_the_message_names_what_was_called_and_on_what() -> None:
    assert outcomes()["read sum"]["message"].startswith(f"sum was called on {NAME}, which is offloaded")
    assert outcomes()["read T"]["message"].startswith(f".T was called on {NAME}")
    assert outcomes()["edit data ="]["message"].startswith(f"assigning to .data was called on {NAME}")
    assert outcomes()["read parameters_to_vector"]["message"].startswith(f"view was called on {NAME}")
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        (said,) = [found["message"] for name, found in outcomes().items() if name.endswith(f" {hook}")]
        assert said.startswith(f"{hook} was called on {NAME}, which is offloaded")
        assert "hold_gradients=True" in said and f"lohan_fx.grad(model, '{NAME}')" in said
    assert outcomes()["read submodule"]["message"].startswith(f"linear was called on {NAME}, layers.0.bias")


@pytest.mark.usefixtures("leak_check")
def test_a_saved_state_dict_holds_the_real_values(tmp_path: Any) -> None:
    model = Tiny()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    (tmp_path / "nvme").mkdir()
    lohan_fx.compile(model, profile(), nvme=tmp_path / "nvme", host_memory="2GiB")
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    lohan_fx.release(model)
    loaded = torch.load(tmp_path / "saved.pt")
    assert list(loaded) == list(values)
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    os.unlink(tmp_path / "saved.pt")


def test_a_shell_without_an_owner_is_as_closed() -> None:
    shell = make_shell(torch.ones(3, 5), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (shell.shape, shell.dtype, shell.requires_grad, shell.grad) == ((3, 5), torch.bfloat16, False, None)
    for call in (shell.sum, shell.detach, shell.requires_grad_, lambda: shell.to("cpu"), lambda: shell.copy_(shell)):
        with pytest.raises(OffloadedParameterError):
            call()


def test_a_shell_takes_no_memory() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * page_padded_bytes(1)

    before = resident_bytes()
    shells = [
        make_shell(torch.empty(1 << 14, 1 << 14), dtype=torch.float32, device=torch.device("cpu")) for _ in range(16)
    ]
    assert sum(shell.nbytes for shell in shells) == 16 << 30
    assert resident_bytes() - before < 64 << 20
