"""The command line: thinwire's options among torchrun's, and what is refused before a rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import SpecError, ThinwireError, UnsupportedError
from thinwire.run.arguments import parse
from thinwire.run.settings import RunSettings


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('is not to be run')\n")
    return str(path)


def test_options_in_any_order_and_the_scripts_own_behind_it(script: str) -> None:
    found = parse(
        ["--nnodes", "2", "--policy", "bf16", "--rdzv-endpoint=h:1", "--lanes", "3", "--axis", "data=dp", "--axis=a=b=tp",
         script, "--policy", "x", "--axis"]
    )  # fmt: skip
    assert found.settings == RunSettings("bf16", axes={"data": "dp", "a=b": "tp"}, lanes=3)
    assert (found.script, found.script_args) == (script, ["--policy", "x", "--axis"])
    assert (found.torchrun.nnodes, found.torchrun.rdzv_endpoint) == ("2", "h:1")
    assert found.starts_ranks
    assert RunSettings.from_json(found.settings.to_json()) == found.settings


@pytest.mark.parametrize("given", [[], ["--policy", "bf16"], ["--policy=bf16", "--require-feedback"]])
def test_without_an_option_of_torchruns_it_may_be_a_rank(script: str, given: list[str]) -> None:
    assert not parse([*given, script, "--nproc-per-node", "8"]).starts_ranks
    assert parse([*given, "--nproc_per_node=1", script]).starts_ranks


def test_a_module_is_not_looked_for_as_a_file() -> None:
    found = parse(["-m", "some.module", "arg"])
    assert (found.settings.module, found.script, found.script_args) == (True, "some.module", ["arg"])
    assert not found.starts_ranks


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (["--policy", "balansed", "{script}"], SpecError, "did you mean 'balanced'"),
        (["--policy", "none.toml", "{script}"], SpecError, "none.toml does not exist"),
        (["{folder}/tarin.py"], UnsupportedError, r"tarin\.py does not exist; did you mean 'train\.py'"),
        (["--no-python", "{script}"], UnsupportedError, "--no-python"),
        (["--log-every", "3", "{script}"], SpecError, "needs --log"),
    ],
)
def test_what_is_refused(script: str, given: list[str], error: type[ThinwireError], message: str) -> None:
    words = [word.format(script=script, folder=Path(script).parent) for word in given]
    with pytest.raises(error, match=message):
        parse(words)


def test_help_has_torchruns_options_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "usage: thinwire run" in shown
    assert "--rdzv-endpoint" in shown
    assert "--require-feedback" in shown


@pytest.mark.parametrize(
    "given",
    [["--axis", "dp"], ["--axis", "data=pd"], ["--lanes", "0"], ["--log-every=-1"], ["--poliyc=x"], []],
)
def test_what_argparse_refuses(script: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*given, script] if given else [])
    assert "thinwire run" in capsys.readouterr().err
