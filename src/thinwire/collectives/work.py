"""Asynchronous calls: a worker thread with an ordered queue, and the Work that PyTorch waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from .side_stream import SideStreams, cuda_device, reached


class Work(dist.Work):
    """The handle of an asynchronous call. ``get_future()`` holds the output tensors, as PyTorch expects."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        device = cuda_device(result)
        # With a device, whoever waits makes its current stream wait for the one that was current at the end of the call.
        self._future: Future[Any] = Future(devices=None if device is None else [device])
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call is done; raises what it raised. The transport's time-out bounds the wait."""
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        # DDP reads it in C++, where an exception that was set as one is the result: of a callback it is an error.
        return self._future.then(_value)

    def result(self) -> Any:
        return self._result

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _finish(self, error: BaseException | None = None) -> None:
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            # Future takes Exception only; KeyboardInterrupt does not reach a worker thread.
            assert isinstance(error, Exception)
            self._future.set_exception(error)


def _value(future: Future[Any]) -> Any:
    return future.value()


class Joined(dist.Work):
    """Several Works as one: complete when all are."""

    def __init__(self, works: Sequence[dist.Work], result: Any) -> None:
        super().__init__()
        self._works = list(works)
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def get_future(self) -> Future[Any]:
        def join(collected: Future[Any]) -> Any:
            for future in collected.value():
                future.value()  # raises what it failed with
            return self._result

        return collect_all([work.get_future() for work in self._works]).then(join)

    def result(self) -> Any:
        return self._result

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)


def done(result: Any) -> Work:
    """A Work that is complete from the start."""
    work = Work(result)
    work._finish()
    return work


def failed(result: Any, error: Exception) -> Work:
    """A Work that has failed: waiting for it raises ``error``."""
    work = Work(result)
    work._finish(error)
    return work


class Failure:
    """Of calls that must not go on without each other: the first error of any. ``error``: None as long as there is none."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def note(self, error: Exception) -> None:
        """Keep the error, if it is the first."""
        with self._lock:
            if self.error is None:
                self.error = error


class Worker:
    """A thread that runs calls one after the other, in the order in which they were submitted.

    Those whose result is on a CUDA device run on a stream of the worker's own there, see :mod:`.side_stream`.
    After a call has failed, the peers' order of calls is unknown: the worker refuses all later ones with
    the first error instead of hanging in them. failure: shared with others whose calls have failed then, too.
    """

    def __init__(self, name: str, failure: Failure | None = None) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._streams = SideStreams()
        self._failure = failure if failure is not None else Failure()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object], result: Any) -> Work:
        """Queue a call; the Work completes with ``result`` once it has run."""
        work = Work(result)
        if torch.is_inference_mode_enabled():
            # The mode belongs to a thread, and its tensors may be written only inside of it.
            call = torch.inference_mode()(call)
        device = cuda_device(result)
        self._queue.put(_Item(call, work, device, None if device is None else reached(device)))
        return work

    def close(self, timeout: float = 5.0) -> None:
        """Run what is queued, then end the thread."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                if item.device is None or item.ready is None:
                    self._complete(item)
                else:
                    with self._streams.after(item.ready, item.device):
                        self._complete(item)
                        self._streams.hold(item.call, item.device)
                # Do not keep the tensors of the last call alive while waiting for the next one.
                del item
                self._streams.release(wait=self._queue.empty())

    def _complete(self, item: _Item) -> None:
        try:
            if self._failure.error is not None:
                raise self._failure.error
            item.call()
        except Exception as e:
            self._failure.note(e)
            item.work._finish(e)
        else:
            item.work._finish()


@dataclass(frozen=True)
class _Item:
    """A call and its handle. ready: how far the caller's stream was on ``device`` when it was made; None on the CPU."""

    call: Callable[[], object]
    work: Work
    device: torch.device | None
    ready: torch.cuda.Event | None
