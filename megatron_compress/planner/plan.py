"""The step that each choice of compressors makes, and the shortest one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_compress.collectives.message import Message
from megatron_compress.planner.compute import stage_flops
from megatron_compress.planner.measured import Device, Kernel
from megatron_compress.planner.schedule import message_seconds, step_seconds
from megatron_compress.training.model_config import ModelConfig
from megatron_compress.wire import TensorSpec

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_REDUCTIONS = 4  # all-reduces of a layer and microbatch: of attention and MLP, forward and backward


@dataclass(frozen=True)
class Setting:
    """What is to be trained, how it is laid out, and over which links.

    Args:
        sequences, length: of a microbatch.
        link: bits per second between pipeline stages, in each direction.
    """

    model: ModelConfig
    device: Device
    tensor: int
    pipeline: int
    sequences: int
    length: int
    num_microbatches: int
    link: float

    @property
    def activation(self) -> TensorSpec:
        """[s, b, h], what a message carries."""
        shape = (self.length, self.sequences, self.model.hidden_size)
        return TensorSpec(shape, _DTYPES[self.device.element_bytes], sample_dim=1)


@dataclass(frozen=True)
class Choice:
    """A compressor for each kind of message, or None for plain, and the step that comes of it, in seconds."""

    forward: Kernel | None
    backward: Kernel | None
    reductions: Kernel | None
    seconds: float
    free_seconds: float

    @property
    def wire_share(self) -> float:
        """Of the step: what would be saved if communication and compression cost nothing."""
        return 1 - self.free_seconds / self.seconds


def evaluate(setting: Setting, forward: Kernel | None, backward: Kernel | None, reductions: Kernel | None) -> Choice:
    """One choice. A stage's work is its arithmetic, its layers' all-reduces, and the encoding and decoding of what it
    sends and receives; transfers overlap only where messages go through the hooks."""
    device, depth, spec = setting.device, setting.pipeline, setting.activation
    flops = stage_flops(setting.model, setting.sequences, setting.length, setting.tensor, depth)
    free = [count / (device.training_tflops * 1e12) for count in flops]
    layers = setting.model.num_layers / depth
    reduce = _REDUCTIONS * layers * reduction_seconds(setting, reductions)
    stages = [seconds + reduce for seconds in free]
    wires = []
    for kernel, senders, receivers in (
        (forward, range(depth - 1), range(1, depth)),
        (backward, range(1, depth), range(depth - 1)),
    ):
        nbytes = spec.nbytes if kernel is None else kernel.build().payload_bytes(spec)
        wires.append(message_seconds(nbytes, setting.link))
        for stage in senders if kernel else ():
            stages[stage] += kernel.encode_seconds(spec.nbytes)
        for stage in receivers if kernel else ():
            stages[stage] += kernel.decode_seconds(spec.nbytes)
    overlap = device.overlap and (forward or backward) is not None
    seconds = step_seconds(stages, *wires, setting.num_microbatches, overlap)
    return Choice(
        forward, backward, reductions, seconds, step_seconds(free, 0.0, 0.0, setting.num_microbatches, device.overlap)
    )


def reduction_seconds(setting: Setting, kernel: Kernel | None) -> float:
    """Of one all-reduce of n bytes over T ranks.

    Plain: latency + 2(T − 1)/T · n / bandwidth. Compressed to w bytes a rank: latency + w / bandwidth + encode(n) +
    the sum of T payloads of n at two ranks, in one shot. Beyond, in two shots: another latency, the sum of T payloads
    of n/T, encode(n/T), and decode(n).
    """
    ranks, spec, device = setting.tensor, setting.activation, setting.device
    if ranks == 1:
        return 0.0
    message = Message("all_reduce", TensorSpec((spec.numel,), spec.dtype), ranks)
    if kernel is None:
        return device.collective_seconds(message.logical_bytes)
    wire = device.collective_seconds(message.wire_bytes(kernel.build()))
    if ranks == 2:
        return wire + kernel.encode_seconds(spec.nbytes) + kernel.decode_seconds(spec.nbytes, ranks)
    part = spec.nbytes // ranks
    again = kernel.decode_seconds(part, ranks) + kernel.encode_seconds(part) + kernel.decode_seconds(spec.nbytes)
    return wire + device.collective_latency * 1e-6 + kernel.encode_seconds(spec.nbytes) + again


def rank(setting: Setting) -> list[Choice]:
    """Every choice of the device's compressors for both directions of the pipeline, and the best for reductions with
    each; the shortest step first."""
    return sorted(_choices(setting), key=lambda choice: choice.seconds)


def _choices(setting: Setting) -> Iterator[Choice]:
    kernels = [None, *setting.device.kernels]
    serving = [k for k in kernels if k is None or (k.sum_of_4 and not k.build().refuse_axis("tensor"))]
    reductions = min(serving if setting.tensor > 1 else [None], key=lambda k: reduction_seconds(setting, k))
    for forward, backward in itertools.product(kernels if setting.pipeline > 1 else [None], repeat=2):
        yield evaluate(setting, forward, backward, reductions)
