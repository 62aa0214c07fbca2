from __future__ import annotations

import pytest
import torch

from thinwire.collectives.side_stream import cuda_device
from thinwire.collectives.work import Work, Worker


@pytest.mark.parametrize("result", [None, "text", [], torch.zeros(1), [torch.zeros(1), [torch.zeros(2)]]])
def test_a_result_of_the_cpu_has_no_stream(result: object) -> None:
    assert cuda_device(result) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_worker_runs_after_its_caller_and_before_who_waits() -> None:
    worker = Worker("test")
    x = torch.zeros(1 << 20, device="cuda")
    assert cuda_device([[x]]) == x.device
    streams: list[torch.cuda.Stream] = []

    def add(y: torch.Tensor) -> None:
        streams.append(torch.cuda.current_stream())
        y.add_(1)

    for i in range(20):
        x.mul_(1)
        work: Work = worker.submit(lambda: add(x), x)
        work.wait()
        assert x.sum().item() == (i + 1) * x.numel()
    assert set(streams) == {streams[0]}
    assert streams[0] != torch.cuda.current_stream()
    worker.close()
