"""Which process groups are the tensor-parallel ones, and which pipeline stage this rank is.

Megatron's `parallel_state` knows both, unless a model was given groups of its own (`pg_collection`). Then the layers
say: every tensor-parallel layer holds its group and runs before any of its traffic; and a schedule is called with the
pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_compress.hooks import active


def layer_forward(original: Callable) -> Callable:
    """Wrap the forward of a tensor-parallel layer class: note its group, unless the layer is an expert's."""

    def forward(self, *args, **kwargs):
        if not getattr(self, "is_expert", False):
            active.installed().tensor_groups.add(self.tp_group)
        return original(self, *args, **kwargs)

    return forward


def is_tensor_group(group: dist.ProcessGroup | None) -> bool:
    """Whether `group` is a tensor-parallel group of dense layers; expert and context groups are not."""
    if group is None:
        return False
    usual = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group is usual or group in active.installed().tensor_groups


def note_pipeline(communicator: object | None, collection: object | None) -> None:
    """Note the pipeline group that a schedule was called with, in its communicator or `pg_collection`, if in any."""
    given = getattr(communicator, "pp_group", None) or getattr(collection, "pp", None)
    active.installed().pipeline_group = given


def pipeline_group() -> dist.ProcessGroup | None:
    """The pipeline that this rank is a stage of; None if there is none."""
    usual = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    return active.installed().pipeline_group or usual


def stage() -> int:
    """This rank's pipeline stage; 0 without a pipeline."""
    group = pipeline_group()
    return 0 if group is None else group.rank()
