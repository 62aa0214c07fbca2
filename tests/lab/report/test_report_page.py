import math
import re
from html.parser import HTMLParser

import pytest
import report_sample

from thinwire.lab.bench.record import write_json
from thinwire.lab.report import from_dict, summarise, text, write_report
from thinwire.lab.report.figures import FIGURES
from thinwire.lab.report.page import render

_VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects tags, the addresses they load, and whether elements nest."""

    def __init__(self, source):
        super().__init__()
        self.open, self.addresses, self.tags, self.words = [], [], set(), ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_json(folder / "result.json", report_sample.crowded())
    paths = write_report(folder / "result.json", folder / "out")
    return paths, paths[0].read_text(encoding="utf-8")


def page(result):
    result = from_dict(result)
    source = render(result, summarise(result), [])
    return Page(source).words, source


def test_files(written):
    paths, _ = written
    assert [p.name for p in paths] == ["report.html", *(f"{kind.name}.png" for kind in FIGURES)]
    for path in paths[1:]:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") == 1600  # the width in the PNG header
        assert len(data) > 20_000
    assert paths[0].stat().st_size < 2_000_000


def test_page_is_self_contained(written):
    parsed = Page(written[1])
    assert parsed.addresses
    assert all(a.startswith("data:image/svg+xml;base64,") for a in parsed.addresses)
    assert not parsed.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"url\(|@import", written[1])


def test_page_holds_everything(written):
    words = Page(written[1]).words
    result = report_sample.crowded()
    for run in result["runs"]:
        assert run["policy"] in words
        assert run["description"] in words
    for term in ("raw bytes", "wire bytes", "zero-communication step", "comm share", "loss parity"):
        assert term in words
    assert result["command"] in words
    assert result["environment"]["cpu"] in words
    assert result["link"]["note"] in words
    assert "reduce_scatter" in words  # the message profile
    assert "16,777,216 bytes" in words  # the calibration


def test_headline_is_computed():
    result = from_dict(report_sample.five_seeds())
    summary = summarise(result)
    gain = summary.row("balanced").samples_per_s / summary.row("bf16").samples_per_s
    words = text.headline(summary)
    assert words.startswith(
        f"`balanced` trains {gain:.2f}× as many samples per second as a bf16 wire and reaches"
    )
    assert words.endswith("nats, 5 seeds)")
    assert "at no measurable loss" in words
    assert f"{100 * summary.row('balanced').limit_share:.0f} % of the zero-communication limit" in words


def headline(change, policies=("none", "bf16", "balanced"), seeds=5):
    runs = [report_sample.make_run(p, s, 5) for p in policies for s in range(seeds)]
    for run in runs:
        change(run)
    return text.headline(summarise(from_dict(report_sample.make_result(runs))))


def balanced(**fields):
    return lambda run: run.update(fields) if run["policy"] == "balanced" else None


def test_headline_claims_no_more_than_there_is():
    assert "not tested (4 seeds; 5 are needed)" in headline(balanced(), seeds=4)
    assert "but not at loss parity" in headline(balanced(val_loss=9.0))
    assert "but its training diverged" in headline(balanced(val_loss=math.nan))
    assert "is slower than a bf16 wire here" in headline(balanced(samples_per_s=1.0))
    same = report_sample.make_run("bf16", 0, 5)["samples_per_s"]
    words = headline(lambda run: run.update(samples_per_s=same))
    assert "is no faster than a bf16 wire" in words
    assert "uncompressed fp32" in headline(balanced(), policies=("none", "balanced"))
    assert headline(balanced(zero_comm_step_ms=None)).count("zero-communication") == 0


def test_the_reference_is_the_faster_uncompressed_run():
    runs = [report_sample.make_run(p, 0, 5) for p in ("none", "none", "balanced")]
    runs[1].update(policy="plain", samples_per_s=2 * runs[0]["samples_per_s"])
    assert summarise(from_dict(report_sample.make_result(runs))).fp32.policy == "plain"


@pytest.mark.parametrize(
    ("emulation", "words"),
    [
        ("paced", "Paced transport: no network was emulated"),
        ("none", "No emulation:"),
        ("netns", "network namespaces"),
    ],
)
def test_the_network_is_named(emulation, words):
    result = report_sample.make_result([report_sample.make_run("balanced", 0, 5)], emulation=emulation)
    assert words in page(result)[0]


def test_everything_is_escaped():
    bad = '<script>alert("&")</script>'
    result = report_sample.make_result([report_sample.make_run(p, 0, 5) for p in ("none", "balanced")])
    run = result["runs"][0]
    run.update(description=bad)
    run["messages"][0].update(axis=bad, op=bad, role=bad, dtype=bad, codec=bad)
    result["runs"][1].update(policy=bad, description=bad)
    result.update(command=bad)
    result["link"].update(spec=bad, note=bad)
    result["model"].update(preset=bad, precision=bad)
    result["layout"][bad] = 2
    result["environment"] = dict.fromkeys((*result["environment"], bad), bad)
    words, source = page(result)
    assert "<script" not in source
    assert words.count(bad) >= 15


def test_one_policy_and_no_optional_fields(tmp_path):
    run = {"policy": "$odd_name$", "seed": 0, "steps": 3, "samples_per_s": 1, "step_ms_median": 2.5}
    result = report_sample.make_result([run], emulation="none")
    result.update(calibration=[], environment={})
    result["link"] = {"spec": "local", "emulation": "none"}
    paths = write_report(from_dict(result), tmp_path)
    assert [p.name for p in paths] == ["report.html", "speed.png"]
    words = Page(paths[0].read_text(encoding="utf-8")).words
    assert "$odd_name$ trains 1.00 samples per second; loss parity not tested" in words
