"""The paths that Megatron takes, as cases; which of them cover all pairs; and the traffic that each must cause."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_compress.config import CompressionConfig
from megatron_compress.wire import TensorSpec
from tests.hooks import runs

AXES = {
    "schedule": ("1f1b", "interleaved", "overlap", "flush", "variable"),
    "sequence_parallel": (False, True),
    "recompute": (False, True),
    "tensor": (1, 2),
    "pipeline": (1, 2, 4),
}
STEPS = 2
LENGTHS = (32, 16, 24, 8)  # tokens of the microbatches under "variable"


class Case(NamedTuple):
    """One path: overlap and flush are the interleaved schedule with p2p overlapped, and with its ends overlapped too;
    variable is 1F1B with microbatches of different lengths."""

    schedule: str
    sequence_parallel: bool
    recompute: bool
    tensor: int
    pipeline: int

    def __str__(self) -> str:
        extras = ("sp " if self.sequence_parallel else "") + ("recompute " if self.recompute else "")
        return f"{self.schedule} {extras}tp{self.tensor} pp{self.pipeline}"

    @property
    def possible(self) -> bool:
        messages = self.pipeline > 1 or self.schedule == "1f1b"
        return messages and (self.tensor > 1 or not self.sequence_parallel)

    @property
    def world_size(self) -> int:
        """Four processes, of which what is left over is data-parallel; eight where it takes them."""
        return max(4, self.tensor * self.pipeline)

    @property
    def chunks(self) -> int:
        """Model chunks of a stage."""
        return 2 if self.schedule in ("interleaved", "overlap", "flush") else 1

    @property
    def layers(self) -> int:
        """Of a stage."""
        return max(2, self.pipeline * self.chunks) // self.pipeline

    @property
    def layout(self) -> dict:
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "data": self.world_size // (self.tensor * self.pipeline),
            "layers": self.layers * self.pipeline,
            "held_out": self.pipeline,
            "recompute": self.recompute,
            "sequence_parallel": self.sequence_parallel,
            "virtual_pipeline": self.chunks if self.chunks > 1 else None,
        }

    @property
    def settings(self) -> dict:
        """megatron-core's, beside what the trainer makes of the layout: overlapped p2p where there are chunks."""
        return {
            "1f1b": {},
            "interleaved": {"overlap_p2p_comm": False, "batch_p2p_comm": self.pipeline > 2},
            "overlap": {},
            "flush": {"overlap_p2p_comm_warmup_flush": True},
            "variable": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
        }[self.schedule]

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS if self.schedule == "variable" else (runs.SEQUENCE,) * runs.MICROBATCHES


def all_cases() -> list[Case]:
    return [case for values in itertools.product(*AXES.values()) if (case := Case(*values)).possible]


def covering_cases(limit: int) -> list[Case]:
    """Few of the cases of at most `limit` processes, in which all pairs of values occur that occur in any of them."""
    cases = [case for case in all_cases() if case.world_size <= limit]
    missing, chosen = set().union(*map(_pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(case: Case) -> set:
    return set(itertools.combinations(enumerate(case), 2))


class Message(NamedTuple):
    """A message that one rank sends: `shape` is that of the tensor it holds."""

    axis: str
    direction: str
    site: str
    operation: str
    shape: tuple[int, ...]


def predicted(case: Case, stage: int, compress: dict) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(messages, wire bytes) of a rank of `stage` by axis, direction and site: STEPS steps and an evaluation."""
    config = CompressionConfig(**compress)
    messages, wire_bytes = Counter(), Counter()
    passes = [(tokens, True) for tokens in case.lengths * STEPS] + [(runs.SEQUENCE, False)] * case.pipeline
    for tokens, training in passes:
        for message in each_message(case, stage, tokens, training):
            key = message[:3]
            messages[key] += 1
            wire_bytes[key] += bytes_of(message, case.tensor, config)
    return {key: (messages[key], wire_bytes[key]) for key in messages}


def each_message(case: Case, stage: int, tokens: int, training: bool) -> Iterator[Message]:
    """Those of one microbatch (HOOKS §2a)."""
    last = case.pipeline - 1
    if case.tensor > 1:
        emit = _with_sequence_parallel if case.sequence_parallel else _without_sequence_parallel
        yield from emit(case, stage == 0, stage == last, tokens, training)
    shape = (tokens // (case.tensor if case.sequence_parallel else 1), runs.MICRO_BATCH, runs.HIDDEN)
    for _ in range(case.chunks - (stage == last)):
        yield Message("pipeline", "forward", "boundary", "p2p", shape)
    for _ in range(training * (case.chunks - (stage == 0))):
        yield Message("pipeline", "backward", "boundary", "p2p", shape)


def _without_sequence_parallel(case, first, last, tokens, training) -> Iterator[Message]:
    whole = "all_reduce", (tokens, runs.MICRO_BATCH, runs.HIDDEN)
    for site in ("attention", "mlp"):
        for _ in range(case.layers * (2 if training and case.recompute else 1)):
            yield Message("tensor", "forward", site, *whole)
        for _ in range(case.layers * training):
            yield Message("tensor", "backward", site, *whole)
    if first:
        yield Message("tensor", "forward", "embedding", *whole)
    if last and training:
        yield Message("tensor", "backward", "head", *whole)


def _with_sequence_parallel(case, first, last, tokens, training) -> Iterator[Message]:
    gather = "all_gather", (tokens // case.tensor, runs.MICRO_BATCH, runs.HIDDEN)
    scatter = "reduce_scatter", (tokens, runs.MICRO_BATCH, runs.HIDDEN)
    for site in ("attention", "mlp"):
        for _ in range(case.layers * (2 if training and case.recompute else 1)):
            yield Message("tensor", "forward", site, *gather)
            yield Message("tensor", "forward", site, *scatter)
        for _ in range(case.layers * training):
            yield Message("tensor", "forward", site, *gather)  # the input of column-parallel layers, for their weights
            yield Message("tensor", "backward", site, *scatter)
            yield Message("tensor", "backward", site, *gather)
    if first:
        yield Message("tensor", "forward", "embedding", *scatter)
    if first and training:
        yield Message("tensor", "backward", "embedding", *gather)
    if last:
        yield Message("tensor", "forward", "head", *gather)
    if last and training:
        yield Message("tensor", "forward", "head", *gather)
        yield Message("tensor", "backward", "head", *scatter)


def bytes_of(message: Message, ranks: int, config: CompressionConfig) -> int:
    """From one of two ranks: all-reduce and all-gather send a payload of all that the rank holds, reduce-scatter one of
    the other's half."""
    rule = config.rule(message.axis, message.direction)
    spec = TensorSpec(message.shape, torch.float32, 1)
    if message.operation == "p2p":
        return rule.compressor.payload_bytes(spec)
    assert ranks == 2
    numel = spec.numel // 2 if message.operation == "reduce_scatter" else spec.numel
    if message.site in rule.exempt_sites:
        return 4 * numel
    return rule.compressor.payload_bytes(TensorSpec((numel,), torch.float32))
