"""The commands: help that a newcomer understands, and errors that say what to do."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from thinwire.errors import DataError, LayoutError, NetworkError, ThinwireError
from thinwire.lab import cluster as cluster_module
from thinwire.lab.commands import command


def run(*arguments: str) -> None:
    command(list(arguments), standalone_mode=False)


@pytest.mark.parametrize("name", ["train", "compare", "codecs", "doctor"])
def test_every_command_has_help(name: str) -> None:
    shown = CliRunner().invoke(command, [name, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_an_unknown_policy_offers_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ThinwireError, match="did you mean 'zhybrid'"):
        run("train", "--policy", "zhibrid", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_unknown_codec_in_a_policy_file_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[axis.dp]\nreduce = "int7"\n')
    with pytest.raises(ThinwireError, match=r"p\.toml: axis\.dp\.reduce: .*did you mean 'int"):
        run("train", "--policy", str(tmp_path / "p.toml"), "--out", str(tmp_path / "out"))


def test_a_model_that_a_layout_cannot_split(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="heads=4 is not a multiple of tp=3"):
        run("train", "--layout", "dp=1,tp=3", "--out", str(tmp_path / "out"))
    with pytest.raises(LayoutError, match="fewer than"):
        run("train", "--layout", "pp=8", "--out", str(tmp_path / "out"))


def test_missing_and_empty_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        run("compare", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError):
        run("compare", "--data", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_link_without_root_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "available", lambda: "user id is not 0")
    with pytest.raises(NetworkError, match="Run as root, or, where a command has it, with --paced"):
        run("train", "--steps", "1", "--model", "tiny", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_more_hosts_than_ranks(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="cannot be put on 9 hosts"):
        run("train", "--hosts", "9", "--model", "tiny", "--out", str(tmp_path / "out"))


@pytest.mark.timeout(200)
def test_train_resumes(tmp_path: Path) -> None:
    common = ("train", "--layout", "dp=2", "--hosts", "1", "--link", "none", "--model", "tiny")
    run(*common, "--steps", "4", "--out", str(tmp_path / "a"))
    log = (tmp_path / "a" / "log.jsonl").read_text().splitlines()
    assert len(log) == 4
    run(*common, "--steps", "6", "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"))
    assert len((tmp_path / "b" / "log.jsonl").read_text().splitlines()) == 2
