"""Collectives whose payloads a compressor makes. They know nothing of Megatron, and no compressor knows of them."""

from megatron_compress.collectives.all_gather import all_gather
from megatron_compress.collectives.all_reduce import all_reduce
from megatron_compress.collectives.p2p import irecv, isend
from megatron_compress.collectives.reduce_scatter import reduce_scatter
from megatron_compress.collectives.work import Work

__all__ = ["Work", "all_gather", "all_reduce", "irecv", "isend", "reduce_scatter"]
