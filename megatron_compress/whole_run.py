"""Compression for the whole run of somebody's script: installed now, reported when the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path

from rich.console import Console

import megatron_compress
from megatron_compress import cpu
from megatron_compress.hooks.active import get_active
from megatron_compress.traffic import Traffic

# How long the first rank waits for the counts of the others when its own script is through.
_REPORT_SECONDS = 20.0


def begin(config: Path) -> None:
    """Install the hooks, and report the traffic when this process ends.

    Raises:
        ConfigError, UnsupportedMegatronError: as `megatron_compress.install`.
    """
    cpu.apply()
    if os.environ.get("RANK", "0") == "0":
        _show_log()
    megatron_compress.install(config)
    atexit.unregister(_end)  # launched scripts may import `auto` as well
    atexit.register(_end)


def _show_log() -> None:
    """A script that has not set up logging yet would not show what was installed."""
    logger = logging.getLogger("megatron_compress")
    if logger.hasHandlers():
        return
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _end() -> None:
    """The first rank prints what all ranks sent. One that an exception ends prints its own: the others may be stuck."""
    active = get_active()
    if active is None:
        return  # the script has called `uninstall`
    traffic = active.session.traffic
    if hasattr(sys, "last_value"):  # an exception has ended the script
        _print(traffic, f"rank {active.watch.rank}, which an exception ended")
        return
    parts = active.watch.finish(traffic.on_host(), _REPORT_SECONDS)
    if active.watch.rank == 0:
        _print(Traffic.total(parts.values()), _owner(parts, active.watch.size))


def _owner(parts: dict[int, Traffic], size: int) -> str:
    if size == 1:
        return "this rank"
    missing = [rank for rank in range(size) if rank not in parts]
    return f"all {size} ranks" if not missing else f"all ranks but {missing}, which sent no counts"


def _print(traffic: Traffic, owner: str) -> None:
    if traffic.rows():
        Console(highlight=False).print(traffic.table(owner))
    else:
        print(f"megatron_compress: {owner}: no message reached the hooks, so nothing was compressed", flush=True)
