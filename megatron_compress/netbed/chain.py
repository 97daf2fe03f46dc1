"""The network of a bed, by netlink: nodes in a row, each joined to the next by a link of its own.

    node 0 [net0 = east] ===== [west = net0 = east] ===== [west = net0] node 2

In every node a bridge, `net0`, holds its address and joins the ends of its links, so all nodes reach each other, those
further away through the links between. Each end has a token bucket on what it sends: the links are full duplex.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyroute2 import IPRoute

from megatron_compress.netbed import namespaces, owner
from megatron_compress.netbed.errors import BedError, explained

INTERFACE = "net0"
# What an idle link may send at once, but more than one Ethernet frame. On a busy machine the kernel comes round to a
# queue only every few milliseconds; with a smaller bucket the rest of its rate is lost.
_BURST_SECONDS, _LEAST_BURST = 10e-3, 5000
# What may wait at an end: more than one of TCP's largest segments, of which else a part would be dropped.
_QUEUE_SECONDS, _LEAST_QUEUE = 0.05, 256 * 1024


@dataclass(frozen=True)
class Link:
    """One direction of the link between two neighbours."""

    sender: int
    receiver: int

    @property
    def end(self) -> str:
        """The sender's interface."""
        return "east" if self.sender < self.receiver else "west"

    def __str__(self) -> str:
        return f"node {self.sender} to node {self.receiver}"


@dataclass(frozen=True)
class Chain:
    """The network of `num_nodes` nodes.

    Args:
        rate: of every link in each direction, bits per second, Ethernet headers included.
        delay: of every link in each direction, seconds; 0 for none.
    """

    num_nodes: int
    rate: float
    delay: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= self.num_nodes <= 254:
            raise BedError(f"a bed has 2 to 254 nodes, not {self.num_nodes}")

    @property
    def links(self) -> list[Link]:
        pairs = [(i, i + 1) for i in range(self.num_nodes - 1)]
        return [Link(a, b) for west, east in pairs for a, b in ((west, east), (east, west))]

    def address(self, node: int) -> str:
        """Known within the bed only."""
        return f"10.0.0.{node + 1}"

    def build(self) -> None:
        """Raises:
        BedError: not permitted, or the kernel lacks something.
        """
        for node in range(self.num_nodes):
            namespaces.create(owner.name(node))
            with _network(node) as network:
                self._add_node(network, node)
        for west in range(self.num_nodes - 1):
            with _network(west) as network, explained("a virtual Ethernet pair", "veth"):
                peer = {"ifname": "west", "net_ns_fd": owner.name(west + 1)}
                network.link("add", ifname="east", kind="veth", peer=peer)
        for link in self.links:
            with _network(link.sender) as network:
                self._connect(network, link.end)

    def bytes_sent(self) -> dict[Link, int]:
        """By every link so far, Ethernet headers included."""
        return dict(self._counters())

    def _add_node(self, network: IPRoute, node: int) -> None:
        with explained("a bridge", "bridge"):
            network.link("add", ifname=INTERFACE, kind="bridge")
        for name in ("lo", INTERFACE):
            network.link("set", index=_index(network, name), state="up")
        network.addr("add", index=_index(network, INTERFACE), address=self.address(node), prefixlen=24)

    def _connect(self, network: IPRoute, end: str) -> None:
        index = _index(network, end)
        network.link("set", index=index, master=_index(network, INTERFACE), state="up")
        parent = {}
        if self.delay:
            in_flight = int(self.rate * (self.delay + _QUEUE_SECONDS) / 8 / 100) + 1000  # packets, small ones too
            with explained("links with a delay", "sch_netem"):
                network.tc("add", "netem", index=index, handle="1:", delay=int(self.delay * 1e6), limit=in_flight)
            parent = {"parent": "1:1"}
        burst = max(_LEAST_BURST, int(self.rate / 8 * _BURST_SECONDS))
        queue = max(_LEAST_QUEUE, int(self.rate / 8 * _QUEUE_SECONDS))
        bucket = {"rate": int(self.rate / 8), "burst": burst, "limit": burst + queue}
        with explained("links with a rate", "sch_tbf"):
            network.tc("add", "tbf", index=index, handle="2:", **bucket, **parent)

    def _counters(self) -> Iterator[tuple[Link, int]]:
        for link in self.links:
            with _network(link.sender) as network:
                (state,) = network.get_links(_index(network, link.end))
                yield link, state.get_attr("IFLA_STATS64")["tx_bytes"]


@contextmanager
def _network(node: int) -> Iterator[IPRoute]:
    # pyroute2's own NetNS would start a process and end it with a signal, which a handler of ours could see.
    with namespaces.inside(owner.name(node)), IPRoute() as network:
        yield network


def _index(network: IPRoute, name: str) -> int:
    return network.link_lookup(ifname=name)[0]
