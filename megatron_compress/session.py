"""What is active between `install` and `uninstall`: the rules, the step, and the count of all traffic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_compress.collectives.all_reduce import Algorithm
from megatron_compress.collectives.message import Message
from megatron_compress.compressors.base import Compressor
from megatron_compress.config import CompressionConfig, Rule
from megatron_compress.sample_memory import SampleMemory, Samples
from megatron_compress.traffic import Traffic


@dataclass(frozen=True)
class Place:
    """Where a message comes from. Both ends of a message name the same place.

    Args:
        axis: pipeline or tensor.
        direction: forward (activations) or backward (their gradients).
        site: embedding, attention, mlp or head; None for any other part of a model, whose traffic stays plain;
            "boundary" on the pipeline axis.
        stage: pipeline stage of the sender.
        index: on the pipeline axis, the number of the message among those of its direction in a schedule call.
    """

    axis: str
    direction: str
    site: str | None
    stage: int
    index: int = 0


@dataclass(frozen=True)
class Choice:
    """A compressor, or the reason why a message goes plainly; and the bytes that it takes from one rank."""

    compressor: Compressor | None
    wire_bytes: int
    plain_reason: str | None = None


class Session:
    """Decides how each message travels, by what all ranks know, so that all decide alike.

    Args:
        samples: that the next schedule call trains on, for compressors that remember them; set before it.
        evaluating: whether the current schedule call only evaluates.
    """

    def __init__(self, config: CompressionConfig):
        self.config = config
        self.traffic = Traffic()
        self.step = 0
        self.samples: Samples | None = None
        self.evaluating = False
        self._memories: dict[int, SampleMemory] = {}

    def state_dict(self) -> dict:
        """What a checkpoint keeps of this rank's compression; plain values and tensors."""
        memories = {stage: memory.state_dict() for stage, memory in self._memories.items()}
        return {"step": self.step, "config": self.config.digest(), "memories": memories}

    def load_state_dict(self, state: dict) -> list[str]:
        """Go on from such a state; a line for each thing that is not as it was (DESIGN D12)."""
        self.step = state["step"]
        if state["config"] == self.config.digest():
            for stage, memory in state["memories"].items():
                self._memory(stage, memory["capacity"]).load_state_dict(memory)
            return []
        return ["the compression configuration differs from the one that the checkpoint was trained with"]

    def route(self, place: Place, message: Message) -> Compressor | None:
        """The compressor for a message that leaves this rank, or None where it goes plainly; counts it either way."""
        choice = self.choose(place, message)
        flow = self.traffic.flow(place.axis, place.direction, place.site or "other")
        flow.count(message, choice.wire_bytes, choice.plain_reason)
        return choice.compressor and flow.metered(choice.compressor)

    def choose(self, place: Place, message: Message) -> Choice:
        """How a message travels, by rank-independent facts only: sender and receiver choose alike."""
        choice = self.choose_by_rule(place, message)
        if choice.compressor and choice.compressor.remembers:
            return self._remembering(choice.compressor, place, message)
        return choice

    def choose_by_rule(self, place: Place, message: Message) -> Choice:
        """The same but for the samples: a compressor that remembers them has seen all."""
        rule = self.config.rule(place.axis, place.direction)
        if reason := self._why_plain(rule, place, message):
            return Choice(None, message.logical_bytes, reason)
        wire_bytes = message.wire_bytes(rule.compressor, self.algorithm(place.direction))
        # Only the control may be as large as the plain message: it is there to be run, not to save bytes.
        if wire_bytes > message.logical_bytes or (wire_bytes == message.logical_bytes and not rule.compressor.exact):
            return Choice(None, message.logical_bytes, "would grow")
        return Choice(rule.compressor, wire_bytes)

    def _remembering(self, compressor: Compressor, place: Place, message: Message) -> Choice:
        """A step whose samples are new goes as it is, whole: all messages of one schedule call have the same size."""
        memory = self._memory(place.stage, self.samples.per_epoch)
        known = memory.has(self.samples.ids)
        bound = compressor.of_samples(memory, self.samples.microbatches[place.index], known)
        return Choice(bound, message.wire_bytes(bound), None if known else "first epoch")

    def _memory(self, stage: int, capacity: int) -> SampleMemory:
        """Of the link behind a stage. Its size is counted in the report, on both ends."""
        if stage not in self._memories:
            folder = self.config.pipeline.forward.compressor.settings.memory_folder
            rank = dist.get_rank() if dist.is_initialized() else 0
            file = None if folder is None else Path(folder) / f"stage{stage}.rank{rank}"
            self._memories[stage] = SampleMemory(capacity, file)
            self.traffic.flow("pipeline", "forward", "boundary").memories.append(self._memories[stage])
        return self._memories[stage]

    def algorithm(self, direction: str) -> Algorithm:
        """How all-reduces of the tensor axis move their payloads."""
        rule = self.config.tensor.forward if direction == "forward" else self.config.tensor.backward
        return rule.algorithm if rule else "auto"

    def _why_plain(self, rule: Rule | None, place: Place, message: Message) -> str | None:
        if rule is None:
            return "no rule"
        if place.site is None:
            return "other site"
        if place.site in getattr(rule, "exempt_sites", ()):
            return "exempt site"
        if place.stage in rule.exempt_stages:
            return "exempt stage"
        if rule.compressor.remembers and self.evaluating:
            return "evaluation"
        if self.step < rule.first_step:
            return "before first step"
        if message.spec.nbytes < rule.min_bytes:
            return "below min_bytes"
        return None
