import json
import math
import os
import socket
import sys
from pathlib import Path

import pytest

from thinwire.lab.bench.record import _command, command_line, environment, write_json


def test_environment_says_what_ran_and_not_where():
    env = environment()
    assert env["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    for name in ("date", "torch", "numba", "numpy", "cpu", "cores", "memory_bytes", "os"):
        assert env[name], name
    assert {"git_commit", "git_dirty"} <= set(env)
    words = json.dumps(env)
    assert socket.gethostname() not in words.replace(env["cpu"], "")
    assert str(Path.home()) not in words
    assert os.getcwd() not in words


@pytest.mark.parametrize(
    ("full", "argv", "expected"),
    [
        (["/opt/py/bin/python3", "/opt/py/bin/thinwire", "compare", "--out", "a b"],
         ["/opt/py/bin/thinwire", "compare", "--out", "a b"], "thinwire compare --out 'a b'"),
        (["/opt/py/bin/python3", "-m", "thinwire.cli", "x"], ["/lib/thinwire/cli.py", "x"], "python -m thinwire.cli x"),
        (["python3", "-X", "dev", "/elsewhere/bench.py", "-m", "y"], ["/elsewhere/bench.py", "-m", "y"],
         "python bench.py -m y"),
        (["python3", "-c", "print(1)", "x"], ["-c", "x"], "python -c 'print(1)' x"),
    ],
)  # fmt: skip
def test_command(full, argv, expected):
    assert _command(full, argv) == expected


def test_command_line_of_this_process():
    words = command_line()
    assert "pytest" in words
    assert os.path.dirname(sys.executable) not in words.split()[0]


def test_write_is_all_or_nothing(tmp_path):
    path = tmp_path / "r.json"
    write_json(path, {"loss": math.nan, "pair": (1, -math.inf)})
    assert json.loads(path.read_text()) == {"loss": "nan", "pair": [1, "-inf"]}
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text())["loss"] == "nan"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
