"""The pipeline axis: what Megatron's p2p functions send and receive (HOOKS §2c).

Megatron's own function still decides order, groups and batching; it is called with payloads in place of tensors, and
the received ones are decoded, in its own leaf tensors, when their handle is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial

import torch
import torch.distributed as dist

from megatron_compress.collectives.message import Message
from megatron_compress.collectives.p2p import Incoming, pipeline_spec
from megatron_compress.collectives.work import Work
from megatron_compress.hooks import active
from megatron_compress.hooks.overlap import Overlap
from megatron_compress.session import Place
from megatron_compress.wire import compressible

# What each argument of Megatron's function carries, and the sender's distance from this stage.
_SLOTS = {
    "tensor_send_prev": ("backward", 0),
    "tensor_recv_prev": ("forward", -1),
    "tensor_send_next": ("forward", 0),
    "tensor_recv_next": ("backward", +1),
}


def p2p_ops(original: Callable) -> Callable:
    """Wrap `_batched_p2p_ops`, which returns a list of handles, or `_p2p_ops`, which returns a dict of them."""

    def exchange(*, group: dist.ProcessGroup, prev_pipeline_rank: int, next_pipeline_rank: int, **tensors):
        buffers, incoming = dict(tensors), {}
        for slot, tensor in tensors.items():
            if tensor is None or not compressible(tensor):
                continue
            place = _place(slot, group, active.installed().exchanged[slot])
            active.installed().exchanged[slot] += 1
            if slot.startswith("tensor_send"):
                buffers[slot] = _outgoing(tensor, place)
            elif arriving := _incoming(tensor, place):
                incoming[slot] = arriving
                buffers[slot] = arriving.payload
        call = partial(
            original, group=group, prev_pipeline_rank=prev_pipeline_rank, next_pipeline_rank=next_pipeline_rank
        )
        if overlap := active.installed().overlap:
            return _overlapped(overlap, call, group, tensors, buffers, incoming)
        handles = call(**buffers)
        if isinstance(handles, dict):
            works = {key: _handle(handle, f"tensor_{key}", buffers, incoming) for key, handle in handles.items()}
            active.installed().sends += [works[key] for key in works if key.startswith("send")]
            return works
        return [Work(_complete(handles, list(buffers.values()), list(incoming.values())))]

    return exchange


def _overlapped(
    overlap: Overlap, call: Callable, group: dist.ProcessGroup, tensors: dict, buffers: dict, incoming: dict
) -> list[Work] | dict[str, Work]:
    """Handles of what Megatron must wait for now, the receives; as the function that is replaced returns them."""

    def post(slot: str, buffer: torch.Tensor) -> list:
        handles = call(**dict.fromkeys(_SLOTS) | {slot: buffer})
        return list(handles.values()) if isinstance(handles, dict) else handles

    def expected(slot: str) -> torch.Tensor:
        like = next(tensor for tensor in tensors.values() if tensor is not None)
        arriving = _incoming(like, _place(slot, group, 0))
        return arriving.payload if arriving else like

    overlap.begin(post, expected)
    given = {slot: buffer for slot, buffer in buffers.items() if buffer is not None}
    for slot in [slot for slot in given if slot.startswith("tensor_send")]:
        overlap.send(post, slot, given.pop(slot))
    works = {slot: overlap.receive(post, slot, buffer, incoming.get(slot)) for slot, buffer in given.items()}
    # A call without tensors starts nothing; it shows whether Megatron expects a dict here, or a list.
    nothing = call(**dict.fromkeys(_SLOTS))
    return works if isinstance(nothing, dict) else list(works.values())


def _place(slot: str, group: dist.ProcessGroup, index: int) -> Place:
    direction, distance = _SLOTS[slot]
    return Place("pipeline", direction, "boundary", (group.rank() + distance) % group.size(), index)


def _outgoing(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """The payload of a tensor to be sent, or the tensor's values where it goes plainly.

    These stay in memory until the transfer has ended, also where Megatron frees the tensor at once: 0.16 does so with
    overlapped p2p and `deallocate_pipeline_outputs`, whereupon other bytes arrive.
    """
    spec = pipeline_spec(tensor)
    compressor = active.session().route(place, Message("p2p", spec))
    return tensor.detach() if compressor is None else compressor.compress(tensor, spec)


def finish_sends() -> None:
    """Wait for sends whose handles the schedule dropped (0.16 drops the last ones): their memory is free after that."""
    current = active.installed()
    for work in current.sends:
        work.wait()
    current.sends.clear()
    if current.overlap:
        current.overlap.finish()


def _incoming(tensor: torch.Tensor, place: Place) -> Incoming | None:
    spec = pipeline_spec(tensor)
    compressor = active.session().choose(place, Message("p2p", spec)).compressor
    return None if compressor is None else Incoming.expect(tensor, spec, compressor)


def _handle(handle, slot: str, buffers: dict[str, torch.Tensor], incoming: dict[str, Incoming]) -> Work:
    return Work(_complete([handle], [buffers[slot]], [incoming[slot]] if slot in incoming else []))


def _complete(handles: Iterable, buffers: list[torch.Tensor], incoming: list[Incoming]) -> Generator:
    """Wait for `handles` (on NCCL not one for each buffer), then decode; holds `buffers` until then."""
    yield from handles
    for arriving in incoming:
        arriving.finish()
