"""The messages that Megatron sends for one microbatch of a GPT (HOOKS §2a): what the hooks will see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_compress.collectives.message import Message, Operation
from megatron_compress.session import Place
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.model_config import ModelConfig
from megatron_compress.wire import TensorSpec


@dataclass(frozen=True)
class Layout:
    """A model over tensor-parallel ranks and pipeline stages of equal size.

    Args:
        chunks: of the model on each stage; more than one under the interleaved schedule.
        sequences, length: of a microbatch.
        recompute: every layer in full.

    Raises:
        ConfigError: sequence parallelism without ranks that divide the length.
    """

    model: ModelConfig
    tensor: int
    pipeline: int
    chunks: int
    sequences: int
    length: int
    sequence_parallel: bool = False
    recompute: bool = False
    fp32: bool = False

    def __post_init__(self):
        if self.sequence_parallel and (self.tensor == 1 or self.length % self.tensor):
            raise ConfigError(
                f"sequence parallelism needs at least two tensor-parallel ranks that divide the length; "
                f"{self.length} tokens are not shared by {self.tensor}"
            )

    def activation(self, shared: bool) -> TensorSpec:
        """[s, b, h], or a rank's part of it along s if `shared`."""
        shape = (self.length // self.tensor if shared else self.length, self.sequences, self.model.hidden_size)
        return TensorSpec(shape, torch.float32 if self.fp32 else torch.bfloat16, sample_dim=1)


def messages(layout: Layout, stage: int) -> Iterator[tuple[Place, Message]]:
    """What a rank of `stage` sends in one forward and backward pass, kind by kind, each as often as it is sent."""
    first, last = stage == 0, stage == layout.pipeline - 1
    boundary = Message("p2p", layout.activation(layout.sequence_parallel))
    if layout.pipeline > 1:
        yield from (layout.chunks - last) * [(Place("pipeline", "forward", "boundary", stage), boundary)]
        yield from (layout.chunks - first) * [(Place("pipeline", "backward", "boundary", stage), boundary)]
    if layout.tensor == 1:
        return
    layers = layout.model.num_layers // layout.pipeline
    sites = [("embedding", int(first)), ("attention", layers), ("mlp", layers), ("head", int(last))]
    for site, count in sites:
        for direction, operation, times in _site(layout, site):
            message = Message(operation, layout.activation(operation == "all_gather"), layout.tensor)
            yield from count * times * [(Place("tensor", direction, site, stage), message)]


def _site(layout: Layout, site: str) -> list[tuple[str, Operation, int]]:
    """Direction, operation and number of a site's messages.

    Activations enter attention, MLP and head by a gather, where the sequence is shared, and leave attention, MLP and
    embedding by a reduction; gradients go the other way. What a gather brought is not kept, but gathered again in
    backward, and recompute runs the forward of layers twice.
    """
    gathers, reduces = site != "embedding", site != "head"
    passes = 2 if layout.recompute and gathers and reduces else 1
    if layout.sequence_parallel:
        return [
            ("forward", "all_gather", gathers * (passes + 1)),
            ("forward", "reduce_scatter", reduces * passes),
            ("backward", "reduce_scatter", int(gathers)),
            ("backward", "all_gather", int(reduces)),
        ]
    return [("forward", "all_reduce", reduces * passes), ("backward", "all_reduce", int(gathers))]
