"""The tensor axis: reductions and gathers inside tensor-parallel layers (HOOKS §2b)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_compress import collectives
from megatron_compress.collectives.message import Message, Operation
from megatron_compress.compressors.base import Compressor
from megatron_compress.hooks import active, context, groups
from megatron_compress.session import Place
from megatron_compress.wire import TensorSpec, compressible


def reduce(original: Callable) -> Callable:
    """Wrap `mappings._reduce(input_, group)`: a blocking all-reduce, in place if `input_` is contiguous.

    The caller gets the reduced tensor also where it is not (megatron-core 0.16.1 returns the unreduced one).
    """

    def _reduce(input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if group is None or not _is_ours(input_, group):
            return original(input_, group)
        input_ = input_.contiguous()
        _all_reduce(input_, group, async_op=False)
        return input_

    return _reduce


def all_reduce(original: Callable) -> Callable:
    """Wrap `torch.distributed.all_reduce` as the linear layers call it, on the gradient of their input."""

    def dgrad_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.SUM or not _is_ours(tensor, group):
            return original(tensor, op=op, group=group, async_op=async_op)
        return _all_reduce(tensor, group, async_op)

    return dgrad_all_reduce


def all_gather(original: Callable, direction: str | None = None) -> Callable:
    """Wrap `all_gather_into_tensor` as Megatron calls it.

    Args:
        direction: what this gather carries whatever is running. The linear layers gather their input again in
            backward: it is an activation, and must decode to what the forward saw (DESIGN D12).
    """

    def dist_all_gather_func(output, input_, group=None, async_op=False):
        carried = direction or context.direction()
        compressor = _compressor("all_gather", input_, group, carried) if _is_ours(input_, group) else None
        if compressor is None:
            return original(output, input_, group=group, async_op=async_op)
        return _started(collectives.all_gather(output, input_, compressor, group), async_op)

    return dist_all_gather_func


def reduce_scatter(original: Callable) -> Callable:
    """Wrap `reduce_scatter_tensor` as Megatron calls it."""

    def dist_reduce_scatter_func(output, input_, group=None, async_op=False):
        ours = _is_ours(input_, group)
        compressor = _compressor("reduce_scatter", input_, group, context.direction()) if ours else None
        if compressor is None:
            return original(output, input_, group=group, async_op=async_op)
        return _started(collectives.reduce_scatter(output, input_, compressor, group), async_op)

    return dist_reduce_scatter_func


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool):
    direction = context.direction()
    compressor = _compressor("all_reduce", tensor, group, direction)
    if compressor is None:
        return dist.all_reduce(tensor, group=group, async_op=async_op)
    algorithm = active.session().algorithm(direction)
    return _started(collectives.all_reduce(tensor, compressor, group, algorithm), async_op)


def _started(work: collectives.Work, async_op: bool) -> collectives.Work | None:
    """As `torch.distributed`: the handle if asynchronous, else nothing, when done."""
    if async_op:
        return work
    return work.wait()


def _is_ours(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Activations and gradients on a tensor-parallel group, from a Function that communicates; nothing else."""
    return (
        context.direction() is not None
        and compressible(tensor)
        and tensor.numel() > 0
        and groups.is_tensor_group(group)
        and group.size() > 1
    )


def _compressor(
    operation: Operation, tensor: torch.Tensor, group: dist.ProcessGroup, direction: str
) -> Compressor | None:
    message = Message(operation, TensorSpec.of(tensor), group.size())
    return active.session().route(Place("tensor", direction, context.site(), groups.stage()), message)
