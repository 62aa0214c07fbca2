from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import SpecError
from thinwire.toml_tables import check_keys, checked_table, read


def test_read_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    with pytest.raises(SpecError, match=f"policy file {path} does not exist"):
        read(path, "policy file")
    path.write_text("x = [1]")
    assert read(path, "policy file") == {"x": [1]}
    path.write_text("x =")
    with pytest.raises(SpecError, match=f"topology file {path}: "):
        read(path, "topology file")


def test_keys_and_tables_are_checked_where_they_are() -> None:
    assert checked_table({"x": 1}, "axis") == {"x": 1}
    check_keys({"ranks": []}, ("ranks", "within"), "host.a")
    with pytest.raises(SpecError, match=r"host\.a: unknown key 'rank'; did you mean 'ranks'"):
        check_keys({"rank": []}, ("ranks", "within"), "host.a")
    with pytest.raises(SpecError, match="axis: a table is needed, found 3"):
        check_keys(3, ("x",), "axis")
