"""The codec benchmark: what it says of codecs whose ratio and error are known."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from thinwire.codecs import parse
from thinwire.lab.bench.codec import measure, sample, table


def test_sample_is_seeded_and_looks_like_gradients() -> None:
    x = sample(256, 64)
    assert torch.equal(x, sample(256, 64))
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert 1e-8 < float(x.square().mean().sqrt()) < 1e-4
    rows = x.square().mean(1).sqrt()
    assert rows.max() > 20 * rows.min()


def test_rows_tell_ratio_and_error() -> None:
    x = sample(64, 128)
    plain, half, coded = (measure(parse(s), x, 2) for s in ("none", "bf16", "int8:block=128"))
    assert plain.lossless
    assert (plain.ratio, plain.rel_l2, plain.max_err) == (1.0, 0.0, 0.0)
    assert half.ratio == 2.0
    assert 0 < half.rel_l2 < 2**-8
    assert coded.ratio == pytest.approx(32 / 8.25)
    # int8 of a block of 128 Gaussian values: NMSE 4.2e-5.
    assert coded.rel_l2 == pytest.approx(4.2e-5**0.5, rel=0.1)
    for row in (plain, half, coded):
        assert min(row.encode_gb_s, row.decode_gb_s, row.decode_add_gb_s, row.copy_gb_s) > 0


def test_threads_are_restored_and_table_shows_every_codec() -> None:
    before = torch.get_num_threads()
    row = measure(parse("int4"), sample(8, 64), 1)
    assert torch.get_num_threads() == before
    out = io.StringIO()
    Console(file=out, width=160).print(table([row]))
    assert "int4:block=128,round=nearest" in out.getvalue()


def test_empty_tensor() -> None:
    row = measure(parse("int8"), torch.empty(0), 1)
    assert (row.rel_l2, row.max_err) == (0.0, 0.0)
