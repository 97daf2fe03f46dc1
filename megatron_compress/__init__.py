"""Compressed pipeline and tensor-parallel communication for Megatron training."""

from __future__ import annotations

__version__ = "0.1.0"

from megatron_compress.hooks.active import installed
from megatron_compress.hooks.install import install, uninstall
from megatron_compress.registry import register
from megatron_compress.traffic import Traffic

__all__ = ["install", "register", "report", "uninstall"]


def report() -> Traffic:
    """Traffic counted on this rank since `install`; `report().gather()` sums over all ranks.

    Raises:
        NotInstalledError: nothing is installed.
    """
    return installed().session.traffic
