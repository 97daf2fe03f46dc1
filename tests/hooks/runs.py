"""Runs of the trainer inside pool workers, and what tests look at afterwards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_compress import cpu

cpu.apply()

from megatron.core import parallel_state  # noqa: E402  (needs the shims)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402

import megatron_compress  # noqa: E402
from megatron_compress.config import CompressionConfig  # noqa: E402
from megatron_compress.training import model  # noqa: E402
from megatron_compress.training.config import Experiment, ModelConfig, TrainConfig  # noqa: E402
from megatron_compress.training.data import Corpus  # noqa: E402
from megatron_compress.training.loop import Trainer  # noqa: E402
from megatron_compress.training.tokenizer import load_tokenizer  # noqa: E402
from tests.hooks import tracing  # noqa: E402

SEQUENCE, MICRO_BATCH, MICROBATCHES, HIDDEN, LAYERS = 32, 2, 4, 64, 4


def experiment(
    tensor: int,
    pipeline: int,
    data: int = 1,
    tied: bool = False,
    layers: int = LAYERS,
    recompute: bool = False,
    held_out: int = 1,
    precision: str = "fp32",
    query_groups: int = 4,
    epoch_windows: int | None = None,
    **parallel,
) -> Experiment:
    """A GPT of `layers` layers on four microbatches a step; `held_out` microbatches of one data rank's evaluation."""
    gpt = ModelConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=query_groups,
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
            "held_out_windows": MICRO_BATCH * data * held_out,
            "epoch_windows": epoch_windows,
        },
        optimizer={"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 1},
        run={"steps": 100, "recompute": recompute, "precision": precision},
    )
    return Experiment(train, gpt, Path())


def corpus() -> Corpus:
    text = torch.randint(32, 127, (4000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
    return Corpus(text, text[:1000], "random bytes", "", load_tokenizer(None))


class _Trainer(Trainer):
    """A trainer whose microbatches are cut to `lengths` tokens, in turn, if it is given any."""

    lengths: tuple[int, ...] = ()

    def _microbatches(self, step: int) -> list[torch.Tensor]:
        whole = super()._microbatches(step)
        return [tokens[:, : n + 1] for tokens, n in zip(whole, self.lengths or [SEQUENCE] * len(whole), strict=True)]


def run(
    group: dist.ProcessGroup,
    layout: dict,
    compress: dict | None,
    steps: int = 3,
    settings: dict | None = None,
    lengths: tuple[int, ...] = (),
    trace: tuple[str, ...] = (),
    frozen: bool = False,
) -> dict:
    """Train for `steps`, then evaluate.

    Args:
        layout: arguments of `experiment`.
        settings: fields of megatron-core's TransformerConfig beside, or instead of, those that the trainer sets.
        lengths: tokens of each microbatch of a step; all of them by default.
        trace: "calls", "seams" or both, to record what `tests.hooks.tracing` does.
        frozen: train nothing but the norms, so that the linear layers' weights get no gradient.

    Returns:
        losses, digests of the parameters (all, and those that tensor-parallel ranks share), traffic, traces.
    """
    with ExitStack() as stack:
        calls = stack.enter_context(tracing.trace_calls()) if "calls" in trace else None
        stack.enter_context(_model_parallel(**_sizes(layout, settings or {})))
        if compress is not None:
            megatron_compress.install(CompressionConfig(**compress))
        seen = stack.enter_context(tracing.trace_seams()) if "seams" in trace else None
        stack.enter_context(_megatron_settings(settings or {}))
        trainer = _Trainer(experiment(**layout), corpus())
        trainer.lengths = lengths
        if frozen:
            _freeze_linears(trainer)
        losses = [trainer.step(step).loss_hex for step in range(1, steps + 1)]
        held_out = trainer.evaluate(steps).held_out_loss_hex
        return {
            "losses": losses,
            "held_out": held_out,
            "parameters": _digest(trainer, shared_only=False),
            "replicated": _digest(trainer, shared_only=True),
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "pipeline": dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
            "rows": None if compress is None else megatron_compress.report().rows(),
            "memories": None if compress is None else megatron_compress.hooks.active.session().state_dict()["memories"],
            "remembered": None if compress is None else megatron_compress.report().memory_bytes,
            "calls": calls,
            "seen": seen,
        }


def refused(group: dist.ProcessGroup, layout: dict, compress: dict, settings: dict) -> str:
    """The error that a run ends with."""
    try:
        run(group, layout, compress, steps=1, settings=settings)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _freeze_linears(trainer: Trainer) -> None:
    """As with LoRA: gradients flow through the layers, and their own weights get none."""
    for chunk in trainer.chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                for parameter in module.parameters():
                    parameter.requires_grad_(False)


@contextmanager
def _megatron_settings(settings: dict) -> Iterator[None]:
    """The trainer builds its model with these settings for the duration of a with block."""
    config, spec = model.TransformerConfig, model.get_gpt_layer_local_spec
    model.TransformerConfig = lambda **kwargs: config(**kwargs | settings)
    model.get_gpt_layer_local_spec = partial(spec, num_experts=settings.get("num_moe_experts"))
    try:
        yield
    finally:
        model.TransformerConfig, model.get_gpt_layer_local_spec = config, spec


def _sizes(layout: dict, settings: dict) -> dict[str, int | None]:
    """Arguments of `initialize_model_parallel`."""
    return {
        "tensor_model_parallel_size": layout["tensor"],
        "pipeline_model_parallel_size": layout["pipeline"],
        "virtual_pipeline_model_parallel_size": layout.get("virtual_pipeline"),
        "expert_model_parallel_size": settings.get("expert_model_parallel_size", 1),
        "expert_tensor_parallel_size": settings.get("expert_tensor_parallel_size"),
    }


@contextmanager
def _model_parallel(**sizes: int | None) -> Iterator[None]:
    """Megatron's groups for the duration of a with block; Megatron forgets them, but every one holds threads."""
    world = dist.distributed_c10d._world
    before = set(world.pg_map)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    try:
        yield
    finally:
        megatron_compress.uninstall()
        parallel_state.destroy_model_parallel()
        # In the order of their making: to destroy an NCCL group is a collective.
        for made in [made for made in world.pg_map if made not in before]:
            dist.destroy_process_group(made)


def _digest(trainer: Trainer, shared_only: bool) -> str:
    digest = hashlib.sha256()
    for chunk in trainer.chunks:
        for name, parameter in chunk.named_parameters():
            if not (shared_only and getattr(parameter, "tensor_model_parallel", False)):
                digest.update(name.encode() + parameter.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def train_with_hooks_but_on_one(group: dist.ProcessGroup, log: str, without: int, peer_timeout: float) -> None:
    """As a training script of which one rank lacks the call of `install`; an error ends the process."""
    try:
        parallel_state.initialize_model_parallel(1, group.size(), create_gloo_process_groups=False)
        if group.rank() != without:
            rule = CompressionConfig(pipeline={"forward": {"compressor": "fp8"}})
            megatron_compress.install(rule, peer_timeout=peer_timeout)
        Trainer(experiment(tensor=1, pipeline=group.size(), layers=group.size()), corpus()).step(1)
    except Exception as error:
        Path(f"{log}.{group.rank()}").write_text(f"{type(error).__name__}: {error}")
    os._exit(1)


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
