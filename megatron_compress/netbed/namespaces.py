"""Network namespaces: made, entered, emptied and removed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyroute2 import netns

from megatron_compress.netbed import owner
from megatron_compress.netbed.errors import BedError, explained

_DIRECTORY = Path("/var/run/netns")
_EXIT_SECONDS = 10.0


def create(name: str) -> None:
    """Raises:
    BedError: not permitted.
    """
    with explained("a network namespace"):
        netns.create(name)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Sockets that this thread opens, and processes that it starts, belong to the namespace from then on."""
    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


def remove(which: Callable[[str], bool]) -> list[str]:
    """End all processes in the namespaces that `which` accepts and remove these; their names.

    Raises:
        BedError: a process does not end.
    """
    names = [name for name in netns.listnetns() if which(name)]
    for name in names:
        _end_processes(name)
        netns.remove(name)
    return names


def remove_orphans() -> list[str]:
    """Remove what beds left behind whose own process was killed."""
    return remove(owner.is_orphan)


def _end_processes(name: str) -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    while pids := _processes(name):
        if time.monotonic() > deadline:
            raise BedError(f"processes {pids} in the network namespace {name} do not end; end them, then run again")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(name: str) -> list[int]:
    """That live in a namespace. One that cannot be looked at has ended, or is a zombie."""
    wanted, found = (_DIRECTORY / name).stat(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.path.samestat((entry / "ns/net").stat(), wanted):
                    found.append(int(entry.name))
    return found
