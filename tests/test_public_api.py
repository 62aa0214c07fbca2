from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, metadata, resources

import pytest

import thinwire


@pytest.mark.parametrize("package", ["thinwire", "thinwire.codecs", "thinwire.collectives"])
def test_all_exists(package: str) -> None:
    module = import_module(package)
    names = module.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)


def test_nothing_public_is_missing() -> None:
    public = {n for n, v in vars(thinwire).items() if not n.startswith("_") and not inspect.ismodule(v)}
    # register has run on import; nobody needs to call it again.
    assert public - {"register"} == set(thinwire.__all__)


@pytest.mark.parametrize("name", thinwire.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(thinwire, name))


def test_no_name_hides_a_module() -> None:
    """``import thinwire.codecs as c`` takes the attribute of the package, whatever that is."""
    for module in ("codecs", "collectives", "feedback", "group", "policy", "presets", "wire"):
        assert inspect.ismodule(getattr(import_module(f"thinwire.{module}") and thinwire, module))


def test_typed_and_versioned() -> None:
    assert resources.files("thinwire").joinpath("py.typed").is_file()
    assert metadata.version("thinwire") == thinwire.__version__


def test_importing_thinwire_does_not_import_the_lab() -> None:
    code = "import sys, thinwire; print(sorted(m for m in sys.modules if m.startswith('thinwire.lab')))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == "[]"
