"""What the command line does with a bed."""

from __future__ import annotations

import sys

import typer

from megatron_compress.netbed import units
from megatron_compress.netbed.errors import BedError


def run(num_nodes: int, rate: str, delay: str | None, command: list[str]) -> None:
    """`python -m megatron_compress netbed`; ends with the command's status, 2 if there could be no bed."""
    try:
        link_rate, link_delay = units.rate(rate), units.delay(delay) if delay else 0.0
        status = _run(num_nodes, link_rate, link_delay, command)
    except (BedError, ValueError) as error:
        _say(f"error: {error}")
        status = 2
    raise typer.Exit(status)


def _run(num_nodes: int, rate: float, delay: float, command: list[str]) -> int:
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        raise BedError("pyroute2 is not installed; run: pip install 'megatron-compress[netbed]'") from None
    from megatron_compress.netbed.bed import Interrupted, opened
    from megatron_compress.netbed.chain import Chain

    try:
        with opened(Chain(num_nodes, rate, delay)) as bed:
            if bed.orphans:
                _say(f"removed what a killed run left: {', '.join(bed.orphans)}")
            for achieved in bed.achieved:
                _say(str(achieved))
            before = bed.bytes_sent()
            status, failed = bed.run(command)
            for link, count in bed.bytes_sent().items():
                _say(f"{link}: {count - before[link]:,} bytes sent")
            if failed is not None:
                _say(f"node {failed} ended with status {status}; the others were stopped")
            return status
    except Interrupted as end:
        return 128 + end.number


def _say(line: str) -> None:
    """Apart from the command's own output."""
    print(f"netbed: {line}", file=sys.stderr, flush=True)
