"""The rooms of the package: a module imports only from rooms to its left, and the leaves from nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
ROOMS = ("errors", "codecs", "wire", "collectives", "group", "integrate", "run", "lab")
"""From left to right."""
FILES = {
    "policy": "group",
    "presets": "group",
    "feedback": "group",
    "warm_start": "group",
    "inner": "group",
    "mpi": "collectives",
    "cli": "lab",
    "testing": "lab",
}
LEAVES = ("errors", "launch", "machine", "toml_tables", "torch_names")
"""They import only other leaves; any room may import them."""


def room(module: str) -> str:
    """The room of ``thinwire.X.Y``: its first part after the package."""
    first = module.removeprefix("thinwire").strip(".").split(".")[0]
    return FILES.get(first, first)


def modules() -> list[str]:
    names = [p.relative_to(ROOT.parent).with_suffix("").as_posix() for p in sorted(ROOT.rglob("*.py"))]
    return [n.replace("/", ".").removesuffix(".__init__") for n in names]


def path_of(module: str) -> Path:
    base = ROOT.parent / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def imports(module: str) -> Iterator[str]:
    """Absolute names of everything a module imports, functions' own imports included."""
    path = path_of(module)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*stem, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def own(module: str) -> list[str]:
    return [name for name in imports(module) if name == "thinwire" or name.startswith("thinwire.")]


MODULES = modules()
INNER = [m for m in MODULES if m != "thinwire"]


def test_every_module_has_a_room() -> None:
    unknown = [m for m in INNER if room(m) not in ROOMS and room(m) not in LEAVES]
    assert not unknown, f"give these a room: {unknown}"


@pytest.mark.parametrize("module", INNER)
def test_imports_only_from_the_left(module: str) -> None:
    for name in own(module):
        if room(module) in LEAVES:
            assert room(name) in LEAVES, f"{module} is a leaf and imports {name}"
        elif room(name) not in LEAVES:
            assert room(name), f"{module} imports the package as a whole"
            assert ROOMS.index(room(name)) <= ROOMS.index(room(module)), f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in INNER if room(m) == "codecs"])
def test_codecs_know_nothing_of_distributed(module: str) -> None:
    assert not [name for name in imports(module) if name.startswith("torch.distributed")]


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) != "lab"])
def test_the_library_needs_only_torch_numpy_numba(module: str) -> None:
    extras = {"mpi4py", "click", "rich", "matplotlib", "psutil", "tokenizers", "pytest", "hypothesis", "zfpy"}
    found = {name.split(".")[0] for name in imports(module)} & extras
    assert not found or (module, found) == ("thinwire.mpi.library", {"mpi4py"}), (
        "MPI is imported in one place"
    )
    assert not [name for name in own(module) if room(name) == "lab"]


def test_the_walk_sees_relative_and_nested_imports() -> None:
    found = set(imports("thinwire.collectives.frames"))
    assert "thinwire.wire" in found
    assert "thinwire.codecs.base.Codec" in found
    assert "threading" in set(imports("thinwire.launch")), "an import inside of a function"
