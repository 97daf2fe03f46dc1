"""Transfers of the non-interleaved schedule that leave its critical path, on gloo.

Megatron waits for every transfer in the call that names it, and names a receive when it needs the tensor. gloo moves
nothing before both ends have named a transfer, so a link idles while either of its ends computes. Here instead

* a send is waited for when several later ones have been started, or at the end of the schedule: its payload needs no
  tensor of Megatron's;
* a receive is named one message early: when Megatron asks for message k, k + 1 is named too, and then k is waited for.

What is sent, and the order on each link, stay as they are: between two neighbours one direction has one sender, which
sends as many messages in a schedule call as there are microbatches. So the results are the same to the bit. Where that
does not hold (lengths that vary, other communicators, NCCL, whose transfers would wait for each other in one queue)
Megatron's own order stays.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_compress.collectives.p2p import Incoming
from megatron_compress.collectives.work import Work

# Calls Megatron's function with one slot's buffer; the handles.
Post = Callable[[str, torch.Tensor], Any]


@dataclass
class _Early:
    """A receive that has been named: handles, and where its bytes go."""

    buffer: torch.Tensor
    handles: list


@dataclass
class Overlap:
    """The transfers of one schedule call.

    Args:
        left: messages still to be received, by slot of Megatron's function.
        most_sends: that may be in flight, in both directions together.
    """

    left: dict[str, int]
    most_sends: int
    early: dict[str, _Early] = field(default_factory=dict)
    sends: list[Work] = field(default_factory=list)
    begun: bool = False

    @classmethod
    def of(
        cls,
        pipeline: dist.ProcessGroup | None,
        *,
        model,
        num_microbatches: int,
        forward_only: bool = False,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator: object | None = None,
        **_,
    ) -> Overlap | None:
        """For a call of the schedule with these arguments; None where Megatron's own order stays."""
        config = get_model_config(model[0] if isinstance(model, list) else model)
        varies = config.variable_seq_lengths or getattr(config, "mtp_standalone", False) or adjust_tensor_shapes_fn
        if varies or type(p2p_communicator) not in (type(None), P2PCommunicator):
            return None
        if pipeline is None or pipeline.size() == 1 or dist.get_backend(pipeline) != "gloo":
            return None
        left = {"tensor_recv_prev": num_microbatches} if pipeline.rank() else {}
        if pipeline.rank() < pipeline.size() - 1 and not forward_only:
            left["tensor_recv_next"] = num_microbatches
        return cls(left, most_sends=2 * pipeline.size())

    def begin(self, post: Post, expected: Callable[[str], torch.Tensor]) -> None:
        """Name the first receives, as soon as a first message shows what they look like: `expected` of a slot."""
        if not self.begun:
            self.begun = True
            for slot in self.left:
                self._name(post, slot, expected(slot))

    def send(self, post: Post, slot: str, buffer: torch.Tensor) -> None:
        """Start a transfer, and see the oldest end if there are many."""
        self.sends.append(Work(_sending(post(slot, buffer), buffer)))
        if len(self.sends) > self.most_sends:
            self.sends.pop(0).wait()

    def receive(self, post: Post, slot: str, buffer: torch.Tensor, incoming: Incoming | None) -> Work:
        """The message that Megatron asks for now, which `wait()` puts into `buffer` and decodes."""
        early = self.early.pop(slot)
        if early.buffer.shape != buffer.shape or early.buffer.dtype != buffer.dtype:
            raise RuntimeError(
                f"{slot}: a pipeline message of {tuple(buffer.shape)} {buffer.dtype} follows one of "
                f"{tuple(early.buffer.shape)} {early.buffer.dtype} in the same step; set variable_seq_lengths"
            )
        self._name(post, slot, buffer)
        return Work(_receiving(early, buffer, incoming))

    def finish(self) -> None:
        """See all sends end. Errors of those that nobody has waited for show here."""
        for work in self.sends:
            work.wait()
        self.sends.clear()
        if self.early:
            raise RuntimeError(f"{', '.join(self.early)}: fewer pipeline messages than microbatches in this step")

    def _name(self, post: Post, slot: str, like: torch.Tensor) -> None:
        if self.left[slot]:
            self.left[slot] -= 1
            buffer = torch.empty_like(like, requires_grad=False)
            self.early[slot] = _Early(buffer, post(slot, buffer))


def _sending(handles: list, buffer: torch.Tensor) -> Generator:
    """Holds `buffer` until the transfer has ended."""
    yield from handles


def _receiving(early: _Early, buffer: torch.Tensor, incoming: Incoming | None) -> Generator:
    yield from early.handles
    buffer.detach().copy_(early.buffer)
    if incoming is not None:
        incoming.finish()
