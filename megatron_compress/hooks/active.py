"""The session that is installed in this process, which every hook asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_compress.peers import Watch
from megatron_compress.session import Session


class NotInstalledError(RuntimeError):
    """An operation needs an installed configuration and there is none."""


@dataclass
class Active:
    """An installed session.

    Args:
        watch: of the other ranks, started on the first message or schedule call.
        undo: steps of `uninstall`, last first.
    """

    session: Session
    watch: Watch
    undo: list[Callable[[], None]] = field(default_factory=list)
    ready: bool = False


_active: Active | None = None


def set_active(active: Active | None) -> None:
    global _active
    _active = active


def get_active() -> Active | None:
    return _active


def installed() -> Active:
    """What is installed.

    Raises:
        NotInstalledError: nothing is.
    """
    if _active is None:
        raise NotInstalledError("no compression is installed; call megatron_compress.install(config) first")
    return _active


def session() -> Session:
    """The installed session, after the start-up check of all ranks."""
    current = installed()
    if not current.ready:
        current.watch.start()
        current.ready = True
    return current.session
