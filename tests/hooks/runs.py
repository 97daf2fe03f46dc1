"""Runs of the trainer inside pool workers, and what tests look at afterwards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_compress import cpu

cpu.apply()

from megatron.core import parallel_state  # noqa: E402  (needs the shims)

import megatron_compress  # noqa: E402
from megatron_compress.config import CompressionConfig  # noqa: E402
from megatron_compress.training.config import Experiment, ModelConfig, TrainConfig  # noqa: E402
from megatron_compress.training.data import Corpus  # noqa: E402
from megatron_compress.training.loop import Trainer  # noqa: E402

SEQUENCE, MICRO_BATCH, MICROBATCHES, HIDDEN, LAYERS = 32, 2, 4, 64, 4


def experiment(
    tensor: int, pipeline: int, data: int = 1, tied: bool = False, layers: int = LAYERS, **parallel
) -> Experiment:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        normalization="LayerNorm",
        activation="swiglu",
        position_embedding="rope",
        linear_bias=False,
        tied_embeddings=tied,
    )
    train = TrainConfig(
        model="unused",
        parallel={"tensor": tensor, "pipeline": pipeline, **parallel},
        data={
            "sequence_length": SEQUENCE,
            "micro_batch_size": MICRO_BATCH,
            "global_batch_size": MICRO_BATCH * MICROBATCHES * data,
            "held_out_windows": MICRO_BATCH * data,
        },
        optimizer={"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 1},
        run={"steps": 100},
    )
    return Experiment(train, model, Path())


def corpus() -> Corpus:
    text = torch.randint(32, 127, (4000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
    return Corpus(text, text[:500], "random bytes", "")


def run(
    group: dist.ProcessGroup,
    layout: dict,
    compress: dict | None,
    steps: int = 3,
    batched: bool = True,
    evaluate: bool = True,
) -> dict:
    """Train for `steps`; returns losses, a digest of the parameters that all tensor-parallel ranks share, traffic."""
    with _model_parallel(layout["tensor"], layout["pipeline"]):
        if compress is not None:
            megatron_compress.install(CompressionConfig(**compress))
        trainer = Trainer(experiment(**layout), corpus())
        for chunk in trainer.chunks:
            chunk.config.batch_p2p_comm = batched
        losses = [trainer.step(step).loss_hex for step in range(1, steps + 1)]
        held_out = trainer.evaluate(steps).held_out_loss if evaluate else None
        return {
            "losses": losses,
            "held_out": held_out,
            "replicated": _replicated_digest(trainer),
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "rows": None if compress is None else megatron_compress.report().rows(),
        }


@contextmanager
def _model_parallel(tensor: int, pipeline: int) -> Iterator[None]:
    """Megatron's groups for the duration of a with block; Megatron forgets them, but every one holds threads."""
    world = dist.distributed_c10d._world
    before = set(world.pg_map)
    parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
    try:
        yield
    finally:
        megatron_compress.uninstall()
        parallel_state.destroy_model_parallel()
        # In the order of their making: to destroy an NCCL group is a collective.
        for group in [group for group in world.pg_map if group not in before]:
            dist.destroy_process_group(group)


def _replicated_digest(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for chunk in trainer.chunks:
        for name, parameter in chunk.named_parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def train_until_killed(group: dist.ProcessGroup, log: str) -> None:
    """Train without end; stderr goes to the file `log`, prefixed by nothing but what the process says itself."""
    os.dup2(os.open(f"{log}.{group.rank()}", os.O_WRONLY | os.O_CREAT), 2)
    parallel_state.initialize_model_parallel(1, group.size(), create_gloo_process_groups=False)
    megatron_compress.install(CompressionConfig(pipeline={"forward": {"compressor": "fp8"}}), peer_timeout=6.0)
    trainer = Trainer(experiment(tensor=1, pipeline=group.size(), layers=group.size()), corpus())
    step = 0
    while True:
        step += 1
        trainer.step(step)
        Path(f"{log}.{group.rank()}.steps").write_text(str(step))
