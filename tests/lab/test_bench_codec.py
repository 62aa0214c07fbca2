"""The codec benchmark: what it says of codecs whose ratio and error are known."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from thinwire.codecs import parse
from thinwire.lab.bench.codec import measure, measure_peer, sample, table
from thinwire.lab.bench.codec_figure import least_gb_s
from thinwire.lab.bench.peers import installed_peers
from thinwire.lab.commands import command


def test_sample_is_seeded_and_looks_like_gradients() -> None:
    x = sample(256, 64)
    assert torch.equal(x, sample(256, 64))
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert 1e-8 < float(x.square().mean().sqrt()) < 1e-4
    rows = x.square().mean(1).sqrt()
    assert rows.max() > 20 * rows.min()
    rows = sample(256, 1024, decades=0).square().mean(1).sqrt()
    assert rows.max() < 1.2 * rows.min()


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


@pytest.mark.parametrize("spec", ["int4", "topk", "mpc:dim=1"])
def test_threads_code_parts_that_add_up(spec: str) -> None:
    """Cut at granules, values are the same; so are error and, but for headers, ratio."""
    x = sample(64, 1000)
    one, two = measure(parse(spec), x, 1, 1), measure(parse(spec), x, 1, 2)
    assert two.threads == 2
    assert two.rel_l2 == one.rel_l2
    assert two.ratio == pytest.approx(one.ratio, rel=0.02)


def test_bias_is_what_magnitudes_lose() -> None:
    x = torch.linspace(-1, 1, 4096)
    assert measure(parse("none"), x, 1).bias == 0
    assert abs(measure(parse("int8"), x, 1).bias) < 1e-3
    assert measure(parse("topk:k=64"), x, 1).bias < -0.9
    assert abs(measure(parse("sign"), x, 1).bias) < 0.1


def test_peers_give_back_what_they_promise() -> None:
    peers = installed_peers()
    assert {"zfpy rate 8", "zfpy rate 16"} <= {peer.name for peer in peers}
    for peer in peers:
        for dtype in peer.dtypes:
            x = sample(64, 256).reshape(-1).to(dtype)
            row = measure_peer(peer, x, 1)
            assert row.decode_add_gb_s is None
            assert (row.rel_l2 == 0) == peer.lossless
            assert row.nbytes == x.nbytes
    zfpy = next(peer for peer in peers if peer.name == "zfpy rate 8")
    x = sample(64, 256)
    assert measure_peer(zfpy, x, 1).rel_l2 == pytest.approx(measure(parse("zfp:rate=8"), x, 1).rel_l2)


def test_where_compressing_pays() -> None:
    """At the least speed, sending raw bytes takes as long as coding them and sending the payload."""
    link, ratio = 1.25e9, 4.0
    seconds = 1 / (least_gb_s(link, ratio) * 1e9) + 1 / ratio / link
    assert seconds == pytest.approx(1 / link)


def test_command_writes_rows_and_figure(tmp_path: Path) -> None:
    arguments = ["bench", "codec", "int4", "mpc:dim=1", "--size", "4KiB", "--size", "64KiB", "--repeats", "1"]
    run = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path)], catch_exceptions=False)
    assert run.exit_code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    found = {(r["spec"], r["dtype"], r["nbytes"]) for r in result["rows"]}
    ours = {"int4:block=128,round=nearest", "mpc:dim=1"}
    assert {(s, d, n) for s in ours for d in ("float32", "bfloat16") for n in (4096, 65536)} <= found
    assert (tmp_path / "speed.png").exists()


def test_a_size_that_is_none(tmp_path: Path) -> None:
    run = CliRunner().invoke(command, ["bench", "codec", "--size", "3GB", "--out", str(tmp_path)])
    assert run.exit_code == 2
    assert "'3GB' is not a size such as 64KiB" in run.output
