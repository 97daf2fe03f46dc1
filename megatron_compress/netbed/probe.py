"""What a link really carries: bytes through a TCP connection between two nodes, timed where they arrive."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_compress.netbed import owner
from megatron_compress.netbed.chain import Chain, Link
from megatron_compress.netbed.errors import BedError
from megatron_compress.netbed.namespaces import inside

# Ethernet, IP and TCP headers leave 1448 of 1514 bytes; more than the rate, or much less, is no bed to measure in.
_LEAST, _MOST = 0.85, 1.02
_SECONDS = 0.3
_BLOCK = 1 << 16
_PINGS = 5
_ATTEMPTS = 6  # on a machine that others use
_PATIENCE = 30.0


@dataclass(frozen=True)
class Achieved:
    """Of one link: payload bits per second, and seconds from a byte sent to its answer."""

    link: Link
    rate: float
    round_trip: float

    def __str__(self) -> str:
        return f"{self.link}: {self.rate / 1e6:,.1f} Mbit/s of payload, round trip {self.round_trip * 1e3:.2f} ms"


def measure(chain: Chain) -> list[Achieved]:
    """Of every link, one after the other.

    Raises:
        BedError: one does not have its rate.
    """
    return [_accepted(chain, link) for link in chain.links]


def _accepted(chain: Chain, link: Link) -> Achieved:
    for _ in range(_ATTEMPTS):
        result = _measure(chain, link)
        if _LEAST <= result.rate / chain.rate <= _MOST:
            return result
    raise BedError(
        f"{result}, where {chain.rate / 1e6:,.1f} were asked for; ask for a rate that this machine can carry, "
        "or leave it more of the machine"
    )


def _measure(chain: Chain, link: Link) -> Achieved:
    with _connected(chain, link) as (sender, receiver):
        round_trip = min(_ping(sender, receiver) for _ in range(_PINGS))
        return Achieved(link, _throughput(sender, receiver, chain.rate), round_trip)


@contextmanager
def _connected(chain: Chain, link: Link) -> Iterator[tuple[socket.socket, socket.socket]]:
    with inside(owner.name(link.receiver)):
        server = socket.create_server((chain.address(link.receiver), 0))
    with server:
        with inside(owner.name(link.sender)):
            sender = socket.create_connection(server.getsockname(), timeout=_PATIENCE)
        receiver, _ = server.accept()
    with sender, receiver:
        receiver.settimeout(_PATIENCE)
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sender, receiver


def _ping(sender: socket.socket, receiver: socket.socket) -> float:
    start = time.perf_counter()
    for one, other in ((sender, receiver), (receiver, sender)):
        one.sendall(b"?")
        other.recv(1)
    return time.perf_counter() - start


def _throughput(sender: socket.socket, receiver: socket.socket, rate: float) -> float:
    """Bits per second over `_SECONDS` after the first tenth of that, in which TCP and the bucket settle."""
    warm_up, total = (int(rate / 8 * seconds) + _BLOCK for seconds in (_SECONDS / 10, _SECONDS * 1.1))
    thread = threading.Thread(target=_send, args=(sender, total), daemon=True)
    start, end, before, received, block = time.perf_counter(), 0.0, 0, 0, bytearray(_BLOCK)
    thread.start()
    while count := receiver.recv_into(block):
        received, end = received + count, time.perf_counter()
        if not before and received >= warm_up:
            start, before = end, received
    thread.join()
    return 8 * (received - before) / (end - start)


def _send(sender: socket.socket, total: int) -> None:
    """Send so many bytes, or fewer where that takes several times as long as it should."""
    block, deadline = memoryview(bytes(_BLOCK)), time.perf_counter() + 4 * _SECONDS
    for start in range(0, total, _BLOCK):
        sender.sendall(block[: min(_BLOCK, total - start)])
        if time.perf_counter() > deadline:
            break
    sender.shutdown(socket.SHUT_WR)
