"""How a result was made: command, date, commit, versions and machine, so that it can be made again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")


def provenance() -> dict:
    """For a results file; plain JSON values."""
    return {
        "command": " ".join(["python -m megatron_compress", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": _machine(),
    }


def _commit() -> str | None:
    """The commit of the checkout that runs, with `-dirty` if it was changed; None outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()


def _versions() -> dict[str, str]:
    installed = {package: _version(package) for package in _PACKAGES}
    return {package: version for package, version in installed.items() if version is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict:
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        **_processes(),
    }


def _processes() -> dict:
    if not torch.distributed.is_initialized():
        return {"processes": 1}
    return {"processes": torch.distributed.get_world_size(), "backend": torch.distributed.get_backend()}
