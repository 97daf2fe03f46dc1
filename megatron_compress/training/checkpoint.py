"""Checkpoint folders: megatron-core's distributed format, put in place only when whole, and checked before it is read.

    FOLDER/step_00000100/   __0_0.distcp ... (torch_dist), common.pt, metadata.json, manifest.json (size, SHA-256)
    FOLDER/latest           the name of the newest whole one, written last

A save goes to `step_00000100.partial`, which is renamed; a job that is killed at any moment leaves `latest` and what it
names as they were. Nothing in a checkpoint can run code when it is read (`safe_load.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch.distributed.checkpoint.api import CheckpointException  # derives from BaseException

from megatron_compress.training.safe_load import UnsafeFileError, check_metadata, weights_only
from megatron_compress.training.torch_dist import InProcessSave

_NAME = re.compile(r"step_\d{8}")
_MANIFEST = "manifest.json"
_LATEST = "latest"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why, and what to do."""


def name_of(step: int) -> str:
    return f"step_{step:08}"


def steps_in(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def latest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where there is no such file.

    Raises:
        CheckpointError: it names none that is there.
    """
    pointer = folder / _LATEST
    try:
        name = pointer.read_text().strip()
    except FileNotFoundError:
        return None
    if not _NAME.fullmatch(name) or not (folder / name).is_dir():
        raise CheckpointError(f"{pointer}: names {name!r}, which is no checkpoint here; {_others(folder, None)}")
    return folder / name


def save(state: dict, folder: Path, step: int, keep: int) -> Path:
    """Write a sharded state dict as the checkpoint of `step`; the newest `keep` ones stay. Called by every rank.

    Raises:
        CheckpointError: it could not be written; older ones are untouched.
    """
    target = folder / name_of(step)
    partial = target.with_name(target.name + ".partial")
    try:
        _on_first_rank(lambda: _empty(partial))
        dist_checkpointing.save(state, str(partial), InProcessSave())
        _write_manifest(partial)
        _on_first_rank(lambda: _put_in_place(partial, target, keep))
    except (Exception, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)  # makes room; another rank may be doing the same
        older = latest(folder)
        still = f"{older} is as it was" if older else "there is no older one"
        free = shutil.disk_usage(folder).free / 1e6 if folder.exists() else 0
        raise CheckpointError(
            f"{target} could not be written: {_cause(error)}; {free:,.0f} MB are free there now; {still};"
            " see to it and resume"
        ) from error
    return target


def load(state: dict, path: Path) -> dict:
    """Read a checkpoint into a sharded state dict of any layout that holds the same model. Called by every rank.

    Raises:
        CheckpointError: it is incomplete, damaged, not safe to read, or of another model.
    """
    _verify(path)
    _check_release(path)
    try:
        check_metadata(path / ".metadata")
        with weights_only():
            return dist_checkpointing.load(state, str(path))
    except UnsafeFileError as error:
        raise CheckpointError(f"{error}; use checkpoints of this trainer from someone whom you trust") from None
    except (Exception, CheckpointException) as error:
        if isinstance(_first(error), pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} holds what is neither a tensor nor a plain value, so it was not read; use checkpoints of this"
                " trainer from someone whom you trust"
            ) from None
        raise CheckpointError(
            f"{path} does not fit this model, optimizer or layout: {_cause(error)}; start it with the model file that"
            " it was saved with"
        ) from error


def _on_first_rank(action: Callable[[], None]) -> None:
    """Files are moved and removed by one rank while the others wait; they share the file system."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _put_in_place(partial: Path, target: Path, keep: int) -> None:
    folder = target.parent
    if target.exists():  # from a run that was resumed at an older step
        shutil.rmtree(target)
    os.replace(partial, target)
    pointer = folder / f"{_LATEST}.partial"
    pointer.write_text(target.name + "\n")
    _sync(pointer)
    os.replace(pointer, folder / _LATEST)
    for old in steps_in(folder)[:-keep]:
        if old != target:
            shutil.rmtree(old)


def _write_manifest(folder: Path) -> None:
    """Size and SHA-256 of every file, computed by all ranks together, which also sees that they are on the disk."""
    files = _files(folder)
    mine = {str(file.relative_to(folder)): _facts(file, sync=True) for file in files[dist.get_rank() :: _size()]}
    facts = _gather(mine)
    if dist.get_rank() == 0:
        manifest = folder / _MANIFEST
        manifest.write_text(json.dumps(facts, indent=1) + "\n")
        _sync(manifest)


def _verify(path: Path) -> None:
    """Compare the files with the manifest, all ranks together."""
    try:
        expected = json.loads((path / _MANIFEST).read_text())
        names = sorted(expected)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST}: {_cause(error)}; {_others(path.parent, path)}") from None
    mine = {name: _problem(path / name, expected[name]) for name in names[dist.get_rank() :: _size()]}
    problems = [f"{path / name}: {problem}" for name, problem in sorted(_gather(mine).items()) if problem]
    if problems:
        raise CheckpointError("\n".join([*problems, _others(path.parent, path)]))


def _check_release(path: Path) -> None:
    """megatron-core (by 0.19.2) has moved plain values from common.pt to the tensors' files, and reads both."""
    if hasattr(CheckpointingConfig, "common_backend") and not (path / "common.pt").is_file():
        raise CheckpointError(
            f"{path} was written by a later release of megatron-core, whose checkpoints {megatron_version} cannot read;"
            " go on with that release"
        )


def _problem(file: Path, expected: dict) -> str | None:
    if not file.is_file():
        return "missing"
    if file.stat().st_size != expected["bytes"]:
        return f"{file.stat().st_size} bytes where {expected['bytes']} were saved"
    return None if _facts(file)["sha256"] == expected["sha256"] else "damaged (its SHA-256 has changed)"


def _facts(file: Path, sync: bool = False) -> dict:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256") if hasattr(hashlib, "file_digest") else _digest(opened)
        if sync:
            os.fsync(opened.fileno())
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _digest(opened):
    """hashlib.file_digest for Python 3.10."""
    digest = hashlib.sha256()
    while block := opened.read(1 << 20):
        digest.update(block)
    return digest


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _gather(mine: dict) -> dict:
    """The union of all ranks' dicts, on every rank."""
    parts = [None] * _size()
    dist.all_gather_object(parts, mine)
    return {key: value for part in parts for key, value in part.items()}


def _size() -> int:
    return dist.get_world_size()


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _others(folder: Path, damaged: Path | None) -> str:
    others = [path.name for path in steps_in(folder) if path != damaged]
    if not others:
        return "there is no other checkpoint here"
    return f"whole ones here: {', '.join(others)}; write one of these names into {folder / _LATEST} to go on from it"


def _first(error: BaseException) -> BaseException:
    """torch wraps errors in those of all ranks, with their tracebacks; the first rank's will do."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _cause(error: BaseException) -> str:
    """In a line."""
    error = _first(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 600 else text[:600] + " ..."
