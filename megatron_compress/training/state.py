"""A run's state between two steps, as a sharded state dict: what a checkpoint holds, and what a resumed run reads."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_compress.hooks.active import get_active
from megatron_compress.training import checkpoint, optimizer_state
from megatron_compress.training.identity import differences


def save(trainer, step: int, folder: Path, keep: int) -> Path:
    """Write a checkpoint of `trainer` after `step` updates; the folder it is in. Called by every rank."""
    model = _model(trainer.chunks)
    state = {
        **model,
        "optimizer": optimizer_state.sharded(trainer.optimizer, model),
        "scheduler": trainer.scheduler.state_dict(),
        "step": step,
        "experiment": trainer.identity,
        "layout": _layout(),
        "distributed_optimizer": trainer.experiment.train.parallel.distributed_optimizer,
        "rank_state": _sharded(_rank_state()),
    }
    return checkpoint.save(state, folder, step, keep)


def load(trainer, path: Path) -> tuple[int, list[str]]:
    """Go on from a checkpoint; the number of updates that it has had, and what differs from the run that saved it.

    Raises:
        CheckpointError: it is not one that this run can go on from.
    """
    facts = common(path)
    problems, remarks = differences(trainer.identity, facts["experiment"])
    if problems:
        raise checkpoint.CheckpointError(f"{path} is of another run: {'; '.join(problems)}")
    theirs, mine = facts["distributed_optimizer"], trainer.experiment.train.parallel.distributed_optimizer
    if theirs != mine:
        raise checkpoint.CheckpointError(
            f"{path} was saved with parallel.distributed_optimizer: {theirs}, but it is {mine} here; set it to {theirs}"
        )
    model = _model(trainer.chunks)
    state = {**model, "optimizer": optimizer_state.sharded_to_load(trainer.optimizer, model)}
    same_layout = facts["layout"] == _layout()
    if same_layout:
        state["rank_state"] = _sharded({})
    else:
        remarks.append("the layout of ranks differs, so random states start anew and losses will not repeat to the bit")
    loaded = checkpoint.load(state, path)
    _load_model(trainer.chunks, loaded)
    optimizer_state.load(trainer.optimizer, loaded["optimizer"])
    trainer.scheduler.load_state_dict(facts["scheduler"])
    if same_layout:
        remarks += _set_rank_state(loaded["rank_state"])
    return facts["step"], remarks


def load_weights(chunks: list, path: Path) -> None:
    """Read the model of a checkpoint, of a run or imported, into `chunks`, in whatever layout they are.

    Raises:
        CheckpointError: it is damaged or of another model.
    """
    _load_model(chunks, checkpoint.load(_model(chunks), path))


def save_weights(chunks: list, folder: Path, facts: dict) -> Path:
    """Write a checkpoint that holds a model and some plain `facts` about it, but no run. Called by every rank."""
    return checkpoint.save({**_model(chunks), **facts}, folder, 0, keep=1)


def common(path: Path) -> dict:
    """The plain values in a checkpoint: no tensors."""
    return checkpoint.load({}, path)


def _model(chunks: list) -> dict:
    """One entry a virtual stage, `model` if there are none; layers are known by their number in the whole model."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {name: _unwrapped(chunk).sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}


def _load_model(chunks: list, state: dict) -> None:
    for name, chunk in zip(_model(chunks), chunks, strict=True):
        _unwrapped(chunk).load_state_dict(state[name])


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _sharded(mine: dict) -> ShardedObject:
    """What each rank keeps for itself."""
    return ShardedObject("rank_state", mine, (dist.get_world_size(),), (dist.get_rank(),))


def _rank_state() -> dict:
    active = get_active()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "compression": None if active is None else active.session.state_dict(),
    }


def _set_rank_state(state: dict) -> list[str]:
    """Set it; what does not fit."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    active = get_active()
    return (
        [] if active is None or state["compression"] is None else active.session.load_state_dict(state["compression"])
    )


def _layout() -> dict:
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }
    return sizes
