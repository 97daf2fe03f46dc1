"""Whose a namespace is: its name holds the process that made it, so that what a killed run left can be told apart."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"netbed\.(\d+)\.(\d+)\.\d+")


def name(node: int) -> str:
    """Of the namespace of node `node` in a bed of this process."""
    return f"netbed.{os.getpid()}.{_start_of(os.getpid())}.{node}"


def is_mine(namespace: str) -> bool:
    found = _NAME.fullmatch(namespace)
    return found is not None and (int(found[1]), found[2]) == (os.getpid(), _start_of(os.getpid()))


def is_orphan(namespace: str) -> bool:
    """Whether it is of a bed whose process is gone; another process may have its number by now."""
    found = _NAME.fullmatch(namespace)
    return found is not None and _start_of(int(found[1])) != found[2]


def _start_of(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if it is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = state.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] == "Z" else fields[19]
