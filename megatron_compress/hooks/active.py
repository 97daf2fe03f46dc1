"""The session that is installed in this process, which every hook asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_compress.collectives.work import Work
from megatron_compress.peers import Watch
from megatron_compress.session import Session

if TYPE_CHECKING:  # it imports megatron-core
    from megatron_compress.hooks.overlap import Overlap


class NotInstalledError(RuntimeError):
    """An operation needs an installed configuration and there is none."""


@dataclass
class Active:
    """An installed session.

    Args:
        watch: of the other ranks, started on the first message or schedule call.
        undo: steps of `uninstall`, last first.
        tensor_groups: those that tensor-parallel layers were given (`hooks.groups`).
        pipeline_group: the one that the schedule was called with; None where Megatron's `parallel_state` has it.
        exchanged: tensors in each slot of the pipeline functions in the current schedule call.
        checked: model chunks whose layers the rules were found to reach.
        overlap: the current schedule call's transfers, where they leave its critical path.
        sends: transfers that the current schedule call started, kept until they have ended.
    """

    session: Session
    watch: Watch
    undo: list[Callable[[], None]] = field(default_factory=list)
    ready: bool = False
    tensor_groups: set[dist.ProcessGroup] = field(default_factory=set)
    pipeline_group: dist.ProcessGroup | None = None
    exchanged: Counter[str] = field(default_factory=Counter)
    overlap: Overlap | None = None
    sends: list[Work] = field(default_factory=list)
    checked: WeakSet[torch.nn.Module] = field(default_factory=WeakSet)


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
