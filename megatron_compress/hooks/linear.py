"""Linear layers by a method of `megatron_compress.linear`, in the place of megatron-core's product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from megatron_compress.hooks import active, context
from megatron_compress.linear.halo import halo_linear
from megatron_compress.ops.absmax import FORMATS

_SITES = ("attention", "mlp")


def forward_impl(original: Callable) -> Callable:
    """Wrap `_forward_impl` of a tensor-parallel layer: the local product and what a column-parallel one communicates.

    The Hadamards and scales are of the local shard. Communication stays Megatron's, so the tensor axis' rules apply to
    it; but an input that is gathered over the sequence is kept in codes, and not gathered again in backward.
    """

    def _forward_impl(self, input, weight, *args, **kwargs):
        config = active.installed().session.config.linear
        if config is None or context.site() not in _SITES or getattr(self, "is_expert", False):
            return original(self, input, weight, *args, **kwargs)
        x = _communicated(input, kwargs["sequence_parallel"], kwargs["allreduce_dgrad"], kwargs["tp_group"])
        out = halo_linear(x, weight, config.level, FORMATS[config.format])
        bias = kwargs["bias"]
        return out if bias is None else out + bias

    return _forward_impl


def _communicated(
    x: torch.Tensor, sequence_parallel: bool, allreduce_dgrad: bool, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The input as every rank multiplies it; in backward its gradient is summed over the ranks."""
    if sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    return mappings.copy_to_tensor_model_parallel_region(x, group=group) if allreduce_dgrad else x
