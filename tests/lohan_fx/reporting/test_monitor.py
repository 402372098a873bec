"""The monitor counts what one step did, and nothing of the steps around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.reporting.memory_report import MemoryAccounts
from lohan_fx.runtime.resident_limit import ResidentLimit
from tests.tiny import Tiny, batch, profile

PAGE = 4096
PROMISE_BYTES = 1 << 30
SLACK_S = 1e-3
SLACK_BYTES = 32 << 20


@pytest.fixture
def model(tmp_path: Path, leak_check: None) -> Iterator[Tiny]:
    """Trains with everything on NVMe."""
    found = Tiny()
    lohan_fx.compile(
        found, profile(), nvme=tmp_path, host_memory=PROMISE_BYTES, policy="keep", compute_dtype=torch.float32
    )
    with lohan_fx.releasing(found):
        yield found
    torch._dynamo.reset()


def train_once(model: Tiny, optimizer: torch.optim.Optimizer, rows: int = 4) -> None:
    model(batch(rows=rows)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_report_is_of_one_step(model: Tiny) -> None:
    optimizer = lohan_fx.AdamW(model.parameters(), accumulation_steps=1)
    train_once(model, optimizer)
    monitor = lohan_fx.Monitor(model)
    reports = []
    for _ in range(2):
        train_once(model, optimizer)
        reports.append(monitor.step())
    idle = monitor.step()
    for report in reports:
        assert 0 < report.lanes_s["compute"] <= report.seconds + SLACK_S
        assert set(report.lanes_s) <= {"compute", "h2d", "d2h", "ssd", "cpu"}
        assert all(0 <= report.busy(lane) <= 1 + SLACK_S for lane in report.lanes_s)
        assert 0 <= report.stall_s <= report.seconds
    assert reports[0].nvme_read_bytes == reports[1].nvme_read_bytes > 0
    assert reports[0].nvme_written_bytes == reports[1].nvme_written_bytes > 0
    assert idle.nvme_read_bytes == idle.nvme_written_bytes == 0
    assert sum(idle.lanes_s.values()) == idle.stall_s == 0


def test_reports_hold_the_stages_of_their_own_step(model: Tiny) -> None:
    optimizer = lohan_fx.AdamW(model.parameters())
    monitor = lohan_fx.Monitor(model)
    assert monitor.step().stages is None, "nothing has been trained"
    for _ in range(2):
        train_once(model, optimizer)
        report = monitor.step()
        assert report.stages is compiled(model).checks.steps[-1]
        assert report.stages.lane_s("compute") <= report.lanes_s["compute"] + SLACK_S
        assert monitor.plan is not None and report.predicted is monitor.plan.prediction
        assert report.predicted_s == report.predicted.step_s > 0
        assert report.corrected is None
    assert monitor.step().stages is None, "of the step before"


def test_each_step_is_held_against_the_plan_of_its_own_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryAccounts, "expected_peak_bytes", lambda _accounts, added_bytes, *_: added_bytes)
    model = Tiny()
    lohan_fx.compile(
        model,
        profile(),
        nvme=tmp_path,
        host_memory=PROMISE_BYTES,
        compute_dtype=torch.float32,
        dynamic=False,
        revise=False,
    )
    with lohan_fx.releasing(model):
        monitor = lohan_fx.Monitor(model)
        optimizer = lohan_fx.AdamW(model.parameters())
        assert monitor.plan is None
        small, large = (lohan_fx.prepare(model, batch(rows=rows)) for rows in (4, 512))
        assert monitor.plan is large, "none has run: the one captured last"
        for rows, plan in ((4, small), (512, large), (4, small)):
            train_once(model, optimizer, rows)
            with torch.no_grad():
                model(batch(rows=8))
            assert monitor.plan is plan
            assert monitor.step().predicted is plan.prediction
            index = compiled(model).plans.index(plan)
            assert monitor.expected_peak_rss_bytes() == compiled(model).added_bytes()[index]
        assert small.prediction != large.prediction
        assert len(set(compiled(model).added_bytes()[:2])) == 2
    torch._dynamo.reset()


def test_micro_batches_have_no_stages(model: Tiny) -> None:
    optimizer = lohan_fx.AdamW(model.parameters(), accumulation_steps=2)
    monitor = lohan_fx.Monitor(model)
    for _ in range(2):
        model(batch()).backward()
    optimizer.step()
    report = monitor.step()
    assert report.stages is None and report.lanes_s["compute"] > 0


def test_memory_is_held_against_the_promise(model: Tiny) -> None:
    monitor = lohan_fx.Monitor(model)
    train_once(model, lohan_fx.AdamW(model.parameters()))
    report = monitor.step()
    assert report.promised_rss_bytes == compiled(model).rss_before_bytes + PROMISE_BYTES
    assert 0 < report.rss_bytes <= report.peak_rss_bytes < report.promised_rss_bytes
    parameter_bytes = sum(4 * p.numel() for p in model.parameters())
    assert monitor.other_rss_bytes == compiled(model).rss_before_bytes - parameter_bytes


def test_holes_go_back_beyond_the_expected_peak_long_before_the_promise(
    model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[int] = []
    monkeypatch.setattr(ResidentLimit, "expect", lambda _limit, nbytes: expected.append(nbytes))
    optimizer = lohan_fx.AdamW(model.parameters(), accumulation_steps=1)
    for _ in range(3):
        train_once(model, optimizer)
    assert len(expected) == 2, "after capture, and again when the backward has been lowered"
    peak_bytes = lohan_fx.Monitor(model).expected_peak_rss_bytes()
    assert all(abs(nbytes - peak_bytes) < SLACK_BYTES for nbytes in expected)
    assert max(expected) < compiled(model).rss_before_bytes + PROMISE_BYTES // 2


def test_a_recording_holds_the_events_of_its_block_alone(model: Tiny) -> None:
    optimizer = lohan_fx.AdamW(model.parameters(), accumulation_steps=1)
    monitor = lohan_fx.Monitor(model)
    train_once(model, optimizer)
    before = monitor.step()
    with monitor.record() as events:
        train_once(model, optimizer)
    recorded = list(events)
    report = monitor.step()
    train_once(model, optimizer)
    assert events == recorded
    # On a CPU the drives reach the device's memory: nothing is left for h2d and d2h.
    assert {event.lane for event in events} == {"compute", "ssd", "cpu"}
    assert [event.label for event in events if event.lane == "compute"][:1] == ["forward"]
    for prefix, nbytes in (("read", report.nvme_read_bytes), ("write", report.nvme_written_bytes)):
        moved = [event.bytes for event in events if event.lane == "ssd" and event.label.startswith(prefix)]
        assert sum(-(-found // PAGE) * PAGE for found in moved) == nbytes
    assert before.nvme_read_bytes == report.nvme_read_bytes


def test_a_recording_ends_with_an_exception(model: Tiny) -> None:
    monitor = lohan_fx.Monitor(model)
    with pytest.raises(ZeroDivisionError), monitor.record():
        _ = 1 // 0
    with monitor.record() as events:
        pass
    assert events == []


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Tiny is not compiled.*lohan_fx\.compile"):
        lohan_fx.Monitor(Tiny())
