"""event_clock: what goes on when, which job is next, and how jobs slow each other down."""

from __future__ import annotations

from collections.abc import Sequence

from lohan_fx.simulation.event_clock import Clock, Countdown, Job, SimulatedLane, SimulatedShelf, Thread


def alone(jobs: Sequence[Job]) -> list[float]:
    return [1.0] * len(jobs)


def shared(jobs: Sequence[Job]) -> list[float]:
    return [1.0 / len(jobs)] * len(jobs)


def job(label: str, seconds: float) -> Job:
    return Job("lane", label, seconds)


def one(found: Job) -> Thread:
    yield found


def times(clock: Clock) -> list[tuple[str, float, float]]:
    return [(label, start_s, end_s) for _, label, start_s, end_s, _ in clock.events]


def test_jobs_that_share_end_when_their_work_is_done() -> None:
    """2 s and 1 s of work at half speed each until the shorter one is done, then alone."""
    clock = Clock(shared)
    clock.start(one(job("long", 2.0)))
    clock.start(one(job("short", 1.0)))
    clock.run()
    assert times(clock) == [("short", 0.0, 2.0), ("long", 0.0, 3.0)]


def test_speeds_are_asked_once_of_each_company() -> None:
    asked: list[list[str]] = []

    def speeds(jobs: Sequence[Job]) -> list[float]:
        asked.append([found.drive for found in jobs])
        return shared(jobs)

    clock = Clock(speeds)
    for drive in ("read", "write", "read", "write"):
        clock.start(one(Job("ssd", drive, 1.0, drive=drive)))
        if drive == "write":
            clock.run()
    assert asked == [["read", "write"]]
    assert [end for _, _, end in times(clock)] == [2.0, 2.0, 4.0, 4.0]


def test_a_signal_blocks_until_it_is_set() -> None:
    clock = Clock(alone)
    ready = clock.signal()

    def sets() -> Thread:
        yield job("first", 3.0)
        ready.set()

    def waits() -> Thread:
        yield ready
        yield ready  # set already: goes on
        yield job("second", 1.0)

    clock.start(waits())
    clock.start(sets())
    clock.run()
    assert times(clock) == [("first", 0.0, 3.0), ("second", 3.0, 4.0)]


def test_who_waits_for_nobody_is_left_behind() -> None:
    clock = Clock(alone)

    def waits() -> Thread:
        yield clock.signal()
        raise AssertionError("nobody has set it")

    clock.start(waits())
    clock.run()
    assert clock.now_s == 0.0


def test_a_lane_takes_the_lowest_priority_number_and_then_the_oldest() -> None:
    clock = Clock(alone)
    lane = SimulatedLane(clock)

    def submits() -> Thread:
        lane.submit(one(job("running", 1.0)), priority=9)
        yield job("elsewhere", 0.5)
        for label, priority in (("b", 1), ("c", 1), ("a", 0)):
            lane.submit(one(job(label, 1.0)), priority=priority)

    clock.start(submits())
    clock.run()
    assert [label for label, _, _ in times(clock)] == ["elsewhere", "running", "a", "b", "c"]


def test_a_lane_has_as_many_workers_as_threads() -> None:
    clock = Clock(alone)
    lane = SimulatedLane(clock, threads=2)
    for label in "abc":
        lane.submit(one(job(label, 1.0)))
    clock.run()
    assert times(clock) == [("a", 0.0, 1.0), ("b", 0.0, 1.0), ("c", 1.0, 2.0)]
    lane.submit(one(job("d", 1.0)))
    clock.run()
    assert times(clock)[-1] == ("d", 2.0, 3.0)


def test_a_shelf_hands_a_buffer_to_who_has_waited_longest() -> None:
    clock = Clock(alone)
    shelf = SimulatedShelf(clock, 1)

    def uses(label: str) -> Thread:
        yield from shelf.acquire()
        assert shelf.in_use == 1
        yield job(label, 1.0)
        shelf.release()

    for label in "abc":
        clock.start(uses(label))
    clock.run()
    assert times(clock) == [("a", 0.0, 1.0), ("b", 1.0, 2.0), ("c", 2.0, 3.0)]
    assert shelf.in_use == 0
    assert shelf.try_acquire() and not shelf.try_acquire()


def test_who_needs_many_buffers_is_not_overtaken_by_who_needs_few() -> None:
    clock = Clock(alone)
    shelf = SimulatedShelf(clock, 3)

    def uses(label: str, buffers: int) -> Thread:
        yield from shelf.acquire(buffers)
        yield job(label, 1.0)
        shelf.release(buffers)

    for label, buffers in (("two", 2), ("three", 3), ("one", 1), ("another", 2)):
        clock.start(uses(label, buffers))
    clock.run()
    assert times(clock) == [("two", 0.0, 1.0), ("three", 1.0, 2.0), ("one", 2.0, 3.0), ("another", 2.0, 3.0)]
    assert shelf.in_use == 0


def test_a_countdown_of_nothing_is_over_at_once() -> None:
    called: list[str] = []
    Countdown(0, lambda: called.append("none"))
    three = Countdown(3, lambda: called.append("three"))
    for _ in range(3):
        assert called == ["none"]
        three.one_less()
    assert called == ["none", "three"]


def test_jobs_of_no_time_take_none() -> None:
    clock = Clock(shared)
    clock.start(one(job("nothing", 0.0)))
    clock.start(one(job("something", 1.0)))
    clock.run()
    assert times(clock) == [("nothing", 0.0, 0.0), ("something", 0.0, 1.0)]
