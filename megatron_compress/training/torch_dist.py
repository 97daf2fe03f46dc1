"""Writes megatron-core's torch_dist format from within the training processes."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint


class InProcessSave(TorchDistSaveShardedStrategy):
    """What megatron-core's own strategy does, with torch's writer.

    The writer of megatron-core forks processes and waits for them without end: one that dies (for want of memory, say)
    hangs the job, and the processes outlive it. With torch's, an error on one rank is raised on all.
    """

    backend, version = "torch_dist", 1

    def __init__(self):  # all that the other one takes is for its processes
        pass

    def save(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=_Writer(checkpoint_dir, single_file_per_rank=True, overwrite=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class _Writer(checkpoint.FileSystemWriter):
    def write_data(self, plan, planner):
        """A write that fails leaves torch.save with a half-written archive, of which it complains instead."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _os_error(error) or error from None


def _os_error(error: BaseException | None) -> OSError | None:
    """The system's error that one came from, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
