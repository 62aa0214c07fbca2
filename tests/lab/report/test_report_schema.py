import json
import math

import pytest
import report_sample

from thinwire.errors import ThinwireError
from thinwire.lab.bench.record import write_json
from thinwire.lab.report import ResultError, from_dict, load


def test_round_trip(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, report_sample.crowded())
    result = load(path)
    assert result.policies == list(report_sample.POLICIES)
    assert len(result.runs_of("balanced")) == 5
    assert from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_optional_fields_may_be_missing():
    run = {"policy": "none", "seed": 0, "steps": 3, "samples_per_s": 1, "step_ms_median": 2.5}
    result = report_sample.make_result([run])
    for field in ("environment", "calibration", "parity"):
        del result[field]
    result["link"] = {"spec": "local", "emulation": "none"}
    result["model"] = {"preset": "tiny", "parameters": 10}
    read = from_dict(result).runs[0]
    assert read.samples_per_s == 1.0
    assert read.val_loss is None
    assert read.wire_bytes == {}


def test_losses_that_are_not_finite_survive_the_file(tmp_path):
    run = report_sample.make_run("balanced", 0, 10)
    run["val_loss"], run["train_loss"][3] = math.nan, math.inf
    write_json(tmp_path / "r.json", report_sample.make_result([run]))
    read = load(tmp_path / "r.json").runs[0]
    assert math.isnan(read.val_loss)
    assert read.train_loss[3] == math.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(version=2), "version 2; this report reads version 1 only"),
        (lambda r: r.pop("link"), "field 'link' is missing"),
        (
            lambda r: r["link"].update(emulation="magic"),
            r"link\.emulation: expected one of 'netns', 'paced', 'none'",
        ),
        (lambda r: r["link"].update(rate_bit_s=0), "rate_bit_s is 0"),
        (lambda r: r.update(runs=[]), "runs is empty"),
        (lambda r: r["runs"][1].update(seed=1.5), r"runs\[1\]\.seed: expected an integer, found 1\.5"),
        (
            lambda r: r["runs"][0].update(val_los=3.0),
            r"runs\[0\]: unknown field 'val_los'; did you mean 'val_loss'",
        ),
        (
            lambda r: r["runs"][0].update(samples_per_s=-1),
            r"runs\[0\]: samples_per_s is -1\.0; it must be above 0",
        ),
        (lambda r: r["runs"][0].update(samples_per_s=True), "expected a number, found True"),
        (lambda r: r["runs"][0].update(policy=None), "policy: expected a string, found None"),
        (lambda r: r["runs"][0]["wire_bytes"].update(xp=1), "axis 'xp'; axes are dp, tp"),
        (lambda r: r["runs"][0]["wire_bytes"].update(dp=-1), "it must be 0 or more"),
        (lambda r: r["runs"][0].update(val_curve=[[1, 2, 3]]), r"val_curve\[0\]: expected a list of 2"),
        (lambda r: r["runs"][0].update(train_loss="x" * 99), r"expected a list, found 'x+\.\.\."),
        (lambda r: r["runs"][0]["messages"][0].update(count=0), "count is 0"),
        (lambda r: r["runs"][0]["breakdown_ms"].pop("wait"), r"breakdown_ms: field 'wait' is missing"),
    ],
)
def test_what_is_wrong_is_named(change, words):
    result = report_sample.make_result([report_sample.make_run(p, 0, 5) for p in ("none", "bf16")])
    change(result)
    with pytest.raises(ResultError, match=words):
        from_dict(result)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    for content, words in (("{", "x.json is not JSON"), ("[]", "expected an object"), ("\xff", "not JSON")):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ThinwireError, match=words):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.json")
