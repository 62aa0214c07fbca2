from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thinwire.collectives.work import Joined, Work, Worker, done


def worker() -> Worker:
    return Worker("test")


def fail(error: Exception) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def test_calls_run_in_order_and_works_carry_their_results() -> None:
    w, ran = worker(), []
    works = [w.submit(lambda i=i: ran.append(i), [i]) for i in range(20)]
    assert works[-1].wait()
    assert ran == list(range(20))
    assert [work.get_future().value() for work in works] == [[i] for i in range(20)]
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    assert works[3].result() == [3]
    w.close()


def test_a_work_is_not_complete_before_its_call() -> None:
    # torchft 203, torchft 209
    w, gate = worker(), threading.Event()
    work = w.submit(gate.wait, None)
    assert not work.is_completed()
    gate.set()
    assert work.wait()
    w.close()


def test_an_error_reaches_the_waiter_and_stops_all_later_calls() -> None:
    w, error, ran = worker(), KeyError("first"), []
    bad = w.submit(fail(error), None)
    later = w.submit(lambda: ran.append(1), None)
    for work in (bad, later):
        with pytest.raises(KeyError, match="first"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is error
    assert not ran, "the order of calls is lost: a later one must not run"
    w.close()


def test_close_finishes_what_is_queued_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    w, ran = worker(), []
    for i in range(5):
        w.submit(lambda i=i: ran.append(i), None)
    w.close()
    assert ran == list(range(5))
    assert set(threading.enumerate()) == before


def test_tensors_of_a_finished_call_are_let_go() -> None:
    import gc
    import weakref

    w = worker()
    tensor = torch.zeros(10)
    gone = weakref.ref(tensor)
    work = w.submit(tensor.zero_, None)
    work.wait()
    # The worker passes to its next call before it can still hold the last one.
    w.submit(lambda: None, None).wait()
    del tensor, work
    gc.collect()
    assert gone() is None
    w.close()


def test_calls_run_without_grad_and_in_the_callers_inference_mode() -> None:
    w = worker()
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    w.submit(look, None).wait()
    with torch.inference_mode():
        x = torch.zeros(3)
        w.submit(look, None).wait()
        w.submit(lambda: x.add_(1), None).wait()
    w.submit(look, None).wait()
    assert seen == [(False, False), (False, True), (False, False)]
    assert x.tolist() == [1, 1, 1]
    w.close()


def test_done_is_done() -> None:
    work = done([1])
    assert work.wait()
    assert work.get_future().value() == [1]


def test_joined_waits_for_all_and_fails_with_any() -> None:
    w, gate = worker(), threading.Event()
    joined = Joined([done(1), w.submit(gate.wait, None)], "both")
    assert not joined.is_completed()
    future = joined.get_future()
    gate.set()
    assert joined.wait()
    assert future.wait() == "both"
    assert joined.is_success()
    assert joined.result() == "both"
    bad = Joined([done(1), w.submit(fail(ValueError("no")), None)], None)
    with pytest.raises(ValueError, match="no"):
        bad.wait()
    with pytest.raises(Exception, match="no"):
        bad.get_future().wait()
    assert isinstance(done(1), Work)
    w.close()


def test_joined_of_nothing_is_complete() -> None:
    assert Joined([], None).wait()
    assert Joined([], "x").get_future().wait() == "x"
