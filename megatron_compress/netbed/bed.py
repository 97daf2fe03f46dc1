"""A bed from its first namespace to its last: built, measured, used, removed, whatever happens in between."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_compress.netbed import namespaces, owner, probe
from megatron_compress.netbed.chain import Chain, Link
from megatron_compress.netbed.nodes import Nodes

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """This process was asked to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Bed:
    """A built and measured network; `orphans` are the namespaces of killed beds that were removed first."""

    def __init__(self, chain: Chain, orphans: list[str]):
        self.chain = chain
        self.orphans = orphans
        self.achieved = probe.measure(chain)

    def run(self, command: list[str]) -> tuple[int, int | None]:
        """Run `command` in every node; its status, and the node that failed first, if one did: the others are ended."""
        with Nodes(self.chain, command) as nodes:
            return nodes.wait()

    def bytes_sent(self) -> dict[Link, int]:
        """By every link since it was made, the measurement included."""
        return self.chain.bytes_sent()


@contextmanager
def opened(chain: Chain) -> Iterator[Bed]:
    """Build the network, and remove it at the end, with every process in it.

    Raises:
        BedError: not root, a kernel without what it takes, a link without its rate.
        Interrupted: by SIGINT, SIGTERM or SIGHUP; after the clean-up, which no second signal stops.
    """
    before = {number: signal.signal(number, _interrupt) for number in _ENDING}
    try:
        orphans = namespaces.remove_orphans()
        chain.build()
        yield Bed(chain, orphans)
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        namespaces.remove(owner.is_mine)
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _) -> None:
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(number)
