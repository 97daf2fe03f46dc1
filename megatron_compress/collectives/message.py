"""One message, and the bytes that one rank puts on the wire for it, plainly and compressed (DESIGN D10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_compress.collectives.all_reduce import Algorithm, choose
from megatron_compress.collectives.reduction import chunk_numel
from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import TensorSpec

Operation = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Message:
    """What a rank is about to communicate.

    Args:
        operation: the collective, or a point-to-point transfer.
        spec: of this rank's input tensor.
        world_size: ranks of the group; 2 for p2p.
    """

    operation: Operation
    spec: TensorSpec
    world_size: int = 2

    @property
    def logical_bytes(self) -> int:
        """Bytes that the plain operation sends from one rank: p2p the tensor, all-reduce 2(N−1)/N of it, all-gather
        (N−1) times the shard, reduce-scatter (N−1)/N of the tensor."""
        peers = self.world_size - 1
        return {
            "p2p": self.spec.nbytes,
            "all_reduce": 2 * peers * self.spec.nbytes // self.world_size,
            "all_gather": peers * self.spec.nbytes,
            "reduce_scatter": peers * self.spec.nbytes // self.world_size,
        }[self.operation]

    def wire_bytes(self, compressor: Compressor, algorithm: Algorithm = "auto") -> int:
        """The same count for the payloads, metadata and padding of chunks included."""
        if self.operation == "p2p":
            return compressor.payload_bytes(self.spec)
        peers, numel = self.world_size - 1, self.spec.numel
        if self.operation == "all_gather":
            return peers * self._payload_bytes(compressor, numel)
        if self.operation == "reduce_scatter":
            return peers * self._payload_bytes(compressor, numel // self.world_size)
        if choose(algorithm, self.world_size) == "one_shot":
            return peers * self._payload_bytes(compressor, numel)
        return 2 * peers * self._payload_bytes(compressor, chunk_numel(numel, self.world_size, compressor.granularity))

    def _payload_bytes(self, compressor: Compressor, numel: int) -> int:
        return compressor.payload_bytes(TensorSpec((numel,), self.spec.dtype))
