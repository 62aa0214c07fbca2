"""Checkpoints that are either whole or not there.

A checkpoint is written to ``FOLDER/NAME.partial``, flushed to disk, renamed to ``FOLDER/NAME``, and only then named in
``FOLDER/latest``, which is replaced in one operation. A kill or a full disk at any point leaves the one before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from thinwire.errors import CheckpointError

FORMAT = 2
_LATEST = "latest"
_RECORD = "run.json"
_PARTIAL = ".partial"
_T = TypeVar("_T")


def save(folder: Path, values: dict[str, Any], record: dict[str, Any], keep: int) -> Path:
    """Write ``values`` and ``record`` (rank 0's, JSON) as the latest checkpoint of ``folder``.

    values: tensors and bytes, of all ranks. All ranks call it, on a file system that they share. Names may differ
    between ranks; under the same name a DTensor is stored once, whatever its shards, and a plain tensor or bytes
    are taken from one rank. Older checkpoints than the newest ``keep`` are deleted. Raises CheckpointError, on every
    rank, if it cannot be written; the previous checkpoint then still is the latest.
    """
    final = Path(_on_rank0(lambda: _prepare(folder, record["step"])))
    partial = final.with_name(final.name + _PARTIAL)
    try:
        state_dict_saver.save(dict(values), storage_writer=FileSystemWriter(partial, sync_files=True))
    except CheckpointException as e:
        _on_rank0(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise CheckpointError(f"{final} was not written: {_causes(e)}") from e
    _on_rank0(lambda: _publish(partial, final, record, keep))
    return final


def latest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Path and record of the latest checkpoint in ``folder``. Raises CheckpointError if there is none."""
    path, record = _on_rank0(lambda: _read_latest(folder))
    return Path(path), record


def load(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of ``values`` in place from the checkpoint at ``path``, and return them all: bytes are new ones.

    Raises CheckpointError if it lacks one.
    """
    loaded = dict(values)
    try:
        state_dict_loader.load(loaded, storage_reader=FileSystemReader(path))
        return loaded
    except (CheckpointException, OSError, RuntimeError) as e:
        detail = _causes(e) if isinstance(e, CheckpointException) else str(e)
        raise CheckpointError(f"{path} cannot be loaded: {detail}") from e


def check_same_run(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise CheckpointError, naming the settings that differ, unless both describe the same run."""
    before, now = _flat(saved), _flat(current)
    differing = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another run: {'; '.join(differing)}. Resume with the settings it was made with, or take "
            "its weights alone"
        )


def _prepare(folder: Path, step: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(left_over)
    name, attempt = f"step-{step:08d}", 0
    while (folder / name).exists():
        attempt += 1
        name = f"step-{step:08d}.{attempt}"
    return str(folder / name)


def _publish(partial: Path, final: Path, record: dict[str, Any], keep: int) -> None:
    _write(partial / _RECORD, json.dumps({"format": FORMAT, **record}, indent=1))
    _sync_folder(partial)
    partial.rename(final)
    pointer = final.parent / f"{_LATEST}.tmp"
    _write(pointer, final.name)
    pointer.replace(final.parent / _LATEST)
    _sync_folder(final.parent)
    complete = sorted(final.parent.glob("step-*"), key=lambda p: p.stat().st_mtime_ns)
    for old in [p for p in complete if p != final][: -(keep - 1) or None]:
        shutil.rmtree(old)


def _read_latest(folder: Path) -> tuple[str, dict[str, Any]]:
    try:
        path = folder / (folder / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        raise CheckpointError(f"{folder} has no checkpoint: {folder / _LATEST} cannot be read") from None
    try:
        record = json.loads((path / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} is incomplete: {_RECORD}: {e}") from None
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {record.get('format')}, this version reads {FORMAT}")
    if not (path / ".metadata").exists():
        raise CheckpointError(f"{path} is incomplete: .metadata is missing")
    return str(path), record


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_rank0(action: Callable[[], _T]) -> _T:
    """Run ``action`` on rank 0 and give its result, or its failure as CheckpointError, to every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except (CheckpointError, OSError) as e:
            answer[1] = str(e)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    result: _T = answer[0]
    return result


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update(_flat(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves
