"""The front door: install and uninstall."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from megatron_compress import peers
from megatron_compress.config import CompressionConfig
from megatron_compress.hooks import active
from megatron_compress.session import Session

logger = logging.getLogger("megatron_compress")


def install(config: CompressionConfig | str | Path, peer_timeout: float = 50.0) -> Session:
    """Compress Megatron's traffic as `config` says, from now on, in this process. Every rank must call it.

    Idempotent for an equal configuration, reversible by `uninstall()`, and independent of what has been imported.
    The ranks compare versions and configuration at once if `torch.distributed` is initialized, else before the first
    message; from then on each is watched by another (`megatron_compress.peers`).

    Args:
        config: a configuration, or the path of its YAML file.
        peer_timeout: seconds after which a rank that does not answer is named and the job ends.

    Raises:
        ConfigError: the file is wrong.
        UnsupportedMegatronError: no megatron-core that the hooks fit.
        PeerError: another rank has no hooks, or others, or does not answer.
        RuntimeError: another configuration is installed.
    """
    if not isinstance(config, CompressionConfig):
        config = CompressionConfig.load(config)
    if current := active.get_active():
        if current.session.config.digest() == config.digest():
            return current.session
        raise RuntimeError("another compression configuration is installed; call megatron_compress.uninstall() first")

    from megatron_compress.hooks.seams import check, seams  # imports megatron-core

    found = seams()
    version = check(found)
    watch = peers.Watch(config.digest(), version, peer_timeout)
    current = active.Active(Session(config), watch, undo=[watch.stop])
    active.set_active(current)
    for seam in found:
        current.undo.append(seam.apply())
    if dist.is_initialized():
        try:
            active.session()
        except Exception:
            uninstall()
            raise
    _log(version, config)
    return current.session


def uninstall() -> None:
    """Put every replaced name back; does nothing if nothing is installed."""
    current = active.get_active()
    if current is None:
        return
    for undo in reversed(current.undo):
        undo()
    active.set_active(None)


def _log(version: str, config: CompressionConfig) -> None:
    for line in (f"compression installed on {version}", *config.describe()):
        logger.info(line)
