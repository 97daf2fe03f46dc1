"""The commands about published models: write one as a checkpoint, and compare a checkpoint with its source."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from ruamel.yaml import YAML

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training import distributed, state
from megatron_compress.training.config import DataConfig, Experiment, OptimizerConfig, RunConfig, TrainConfig
from megatron_compress.training.importing.reference import logits as reference_logits
from megatron_compress.training.importing.source import Source, read_source
from megatron_compress.training.importing.to_megatron import megatron_weights, padded
from megatron_compress.training.model import build_model

TOLERANCE = 1e-3  # of a logit, in float32; they are tens in size
_CHECKED_TOKENS = 64


def import_model(path: Path, out: Path, tensor_parallel_size: int) -> float:
    """Write `out`/model.yaml, the checkpoint and, where there is one, tokenizer.json. Called in a process alone.

    Args:
        tensor_parallel_size: of the runs to come; heads are added until they can be shared evenly.

    Returns:
        The largest difference between a logit of the new model and of the source.

    Raises:
        ConfigError: the source cannot be read, or its model comes out different.
    """
    source = read_source(path)
    model = padded(source.model, tensor_parallel_size)
    experiment = _experiment(model)
    chunks = build_model(experiment)
    _fill(chunks[0], megatron_weights(source, model))
    if unread := source.unread():
        raise ConfigError(f"{path}: megatron-core's model has no place for {', '.join(unread)}")
    difference = largest_difference(experiment, chunks, source)
    if not difference <= TOLERANCE:
        raise ConfigError(f"{path}: the imported model's logits differ from the source's by up to {difference:.1e}")
    out.mkdir(parents=True, exist_ok=True)
    state.save_weights(chunks, out, {"source": str(path), "largest_logit_difference": difference})
    YAML().dump(model.model_dump(exclude_none=True), out / "model.yaml")
    if source.tokenizer is not None:
        (out / "tokenizer.json").write_text(source.tokenizer)
    return difference


def _experiment(model) -> Experiment:
    """Just enough of one to build a model on one rank."""
    length = min(_CHECKED_TOKENS, model.max_positions or _CHECKED_TOKENS)
    data = DataConfig(sequence_length=length, micro_batch_size=1, global_batch_size=1, held_out_windows=1)
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=0)
    train = TrainConfig(model="model.yaml", data=data, optimizer=optimizer, run=RunConfig(steps=1))
    return Experiment(train, model, Path())


@torch.no_grad()
def _fill(chunk: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    parameters = {name.split("module.")[-1]: parameter for name, parameter in chunk.named_parameters()}
    if unknown := parameters.keys() ^ weights.keys():
        raise ConfigError(f"the source and megatron-core's model do not have the same weights: {sorted(unknown)}")
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise ConfigError(
                f"{name} is {tuple(weights[name].shape)} there, {tuple(parameter.shape)} in megatron-core"
            )
        parameter.copy_(weights[name])


@torch.no_grad()
def largest_difference(experiment: Experiment, chunks: list, source: Source) -> float:
    """Between the logits of `chunks`, in whatever layout, and the source's own. The same on every rank."""
    length = min(_CHECKED_TOKENS, experiment.train.data.sequence_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(source.model.vocab_size, (1, length), generator=generator)
    mine = _logits(chunks, tokens, experiment)
    result = torch.zeros(1, device=distributed.device())
    if mine is not None:
        expected = reference_logits(source, tokens)
        result += (mine[..., : expected.size(-1)] - expected).abs().max()
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.item()


def _logits(chunks: list, tokens: torch.Tensor, experiment: Experiment) -> torch.Tensor | None:
    """float32 [b, s, vocabulary] on the first tensor-parallel rank of the last stage, else None."""

    def forward(_, model):
        here = tokens.to(distributed.device())
        positions = torch.arange(here.size(1), device=here.device).expand_as(here)
        return model(here, positions, None), lambda output, non_loss_data=True: output.float()

    for chunk in chunks:
        chunk.eval()
    # The interleaved schedule wants a multiple of the stages.
    num_microbatches = parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=tokens.size(1),
        micro_batch_size=tokens.size(0),
        forward_only=True,
        collect_non_loss_data=True,
    )
    for chunk in chunks:
        chunk.train()
    if not outputs:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(outputs[0]) for _ in range(group.size())]
    dist.all_gather(parts, outputs[0].contiguous(), group=group)
    return torch.cat(parts, dim=-1).cpu() if group.rank() == 0 else None
