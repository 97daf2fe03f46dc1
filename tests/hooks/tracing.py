"""What a rank hands to torch.distributed, and what Megatron hands to the replaced names and gets back.

Both are recorded around the real functions, which run as ever.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import FunctionType

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings

from megatron_compress.hooks import context

_FUNCTIONS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "isend",
    "irecv",
)


@dataclass(frozen=True)
class Call:
    """A call of torch.distributed.

    Args:
        caller: file:function of megatron.core that it comes from, "" if none.
        ranks: of the group, and whether that is Megatron's tensor-parallel one.
        before, after: digests of the tensor handed over, and of what is there when a blocking call returns.
    """

    function: str
    caller: str
    ranks: tuple[int, ...]
    tensor_parallel: bool
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    before: str
    after: str

    @property
    def compressible(self) -> bool:
        """Whether it comes from one of the functions that the hooks reach, over a group that they serve."""
        file, _, function = self.caller.partition(":")
        layers = file in ("mappings.py", "layers.py") and self.tensor_parallel
        return layers or function in ("_p2p_ops", "_batched_p2p_ops")


@contextmanager
def trace_calls() -> Iterator[list[Call]]:
    """Record every call of torch.distributed. Enter before `install`: the hooks keep the names that they replace."""
    calls: list[Call] = []
    wrapped = {getattr(dist, name): _recorder(getattr(dist, name), calls) for name in _FUNCTIONS}
    _replace(wrapped)
    try:
        yield calls
    finally:
        _replace({wrapper: original for original, wrapper in wrapped.items()})


def _replace(replacements: dict) -> None:
    """Megatron holds some of these functions under names of its own."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("megatron.", "torch.distributed")) and module is not None:
            for attribute, value in list(vars(module).items()):
                if type(value) is FunctionType and value in replacements:
                    setattr(module, attribute, replacements[value])


def _recorder(original, calls: list[Call]):
    signature = inspect.signature(original)

    @wraps(original)
    def record(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        tensor, group = _handed_over(given), given.get("group") or dist.group.WORLD
        kind = (
            original.__name__,
            _caller(),
            tuple(dist.get_process_group_ranks(group)),
            group is parallel_state.get_tensor_model_parallel_group(check_initialized=False),
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.nbytes,
        )
        before = "" if original.__name__ == "irecv" else _digest(tensor)
        result = original(*args, **kwargs)
        after = "" if given.get("async_op") or original.__name__ in ("isend", "irecv") else _digest(_outcome(given))
        calls.append(Call(*kind, before, after))
        return result

    return record


def _handed_over(given: dict) -> torch.Tensor:
    """The tensor whose values leave this rank (arrive, for irecv)."""
    for name in ("input_list", "input_tensor", "input", "tensor"):
        if name in given:
            value = given[name]
            return torch.cat([part.reshape(-1) for part in value]) if isinstance(value, list) else value
    raise TypeError(f"no tensor among {sorted(given)}")


def _outcome(given: dict) -> torch.Tensor:
    for name in ("output_tensor", "output", "tensor_list", "tensor"):
        if name in given:
            value = given[name]
            return torch.cat([part.reshape(-1) for part in value]) if isinstance(value, list) else value
    raise TypeError(f"no result among {sorted(given)}")


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/megatron/core/" in file:
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@dataclass
class Exchange:
    """One collective of the tensor axis, as Megatron sees it.

    Args:
        again: whether it repeats, in backward, a gather of the forward.
    """

    operation: str
    direction: str
    site: str | None
    ranks: tuple[int, ...]
    given: np.ndarray
    got: np.ndarray | None = None
    again: bool = False


@dataclass
class Seen:
    """What Megatron handed to the hooks and got from them, in order, by direction on the pipeline axis."""

    exchanges: list[Exchange] = field(default_factory=list)
    sent: dict[str, list[np.ndarray]] = field(default_factory=lambda: {"forward": [], "backward": []})
    consumed: dict[str, list[np.ndarray]] = field(default_factory=lambda: {"forward": [], "backward": []})


@contextmanager
def trace_seams() -> Iterator[Seen]:
    """Record around the replaced names. Enter after `install`, leave before `uninstall`."""
    seen = Seen()
    places = [
        (mappings, "_reduce", _reducing),
        (mappings, "dist_all_gather_func", _collective("all_gather")),
        (mappings, "dist_reduce_scatter_func", _collective("reduce_scatter")),
        (layers, "dist_all_gather_func", _collective("all_gather")),
        (layers, "dist_reduce_scatter_func", _collective("reduce_scatter")),
        (layers.torch.distributed, "all_reduce", _dgrad),
        (p2p_communication, "_p2p_ops", _sending),
        (p2p_communication, "_batched_p2p_ops", _sending),
        (schedules, "forward_step", _consuming("forward", "input_tensor")),
        (schedules, "backward_step", _consuming("backward", "output_tensor_grad")),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for (owner, name, wrap), (_, _, original) in zip(places, originals, strict=True):
        setattr(owner, name, wrap(original, seen))
    try:
        yield seen
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _copy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().numpy().copy()


class _Watched:
    """A handle; `finish` is called when it has been waited for."""

    def __init__(self, handle, finish):
        self._handle, self._finish = handle, finish

    def wait(self):
        self._handle.wait()
        self._finish()


def _note(seen: Seen, operation: str, tensor: torch.Tensor, group, again: bool = False) -> Exchange:
    direction = "forward" if again else context.direction()
    ranks = tuple(dist.get_process_group_ranks(group))
    seen.exchanges.append(Exchange(operation, direction, context.site(), ranks, _copy(tensor), again=again))
    return seen.exchanges[-1]


def _reducing(original, seen: Seen):
    def _reduce(input_, group):
        exchange = _note(seen, "all_reduce", input_, group)
        output = original(input_, group)
        exchange.got = _copy(output)
        return output

    return _reduce


def _dgrad(original, seen: Seen):
    def all_reduce(tensor, group=None, async_op=False):
        exchange = _note(seen, "all_reduce", tensor, group)
        handle = original(tensor, group=group, async_op=async_op)
        return _finish(handle, exchange, tensor)

    return all_reduce


def _collective(operation: str):
    def wrap(original, seen: Seen):
        def collective(output, input_, group=None, async_op=False):
            # Only the linear layers gather asynchronously: their input, once more.
            again = operation == "all_gather" and async_op
            exchange = _note(seen, operation, input_, group, again)
            return _finish(original(output, input_, group=group, async_op=async_op), exchange, output)

        return collective

    return wrap


def _finish(handle, exchange: Exchange, output: torch.Tensor):
    def finish():
        exchange.got = _copy(output)

    if handle is None:
        return finish()
    return _Watched(handle, finish)


def _sending(original, seen: Seen):
    def exchange(**kwargs):
        for slot, direction in (("tensor_send_next", "forward"), ("tensor_send_prev", "backward")):
            if kwargs[slot] is not None:
                seen.sent[direction].append(_copy(kwargs[slot]))
        return original(**kwargs)

    return exchange


def _consuming(direction: str, argument: str):
    def wrap(original, seen: Seen):
        signature = inspect.signature(original)

        @wraps(original)
        def step(*args, **kwargs):
            value = signature.bind(*args, **kwargs).arguments[argument]
            for tensor in value if isinstance(value, list) else [value]:
                if tensor is not None:
                    seen.consumed[direction].append(_copy(tensor))
            return original(*args, **kwargs)

        return step

    return wrap
