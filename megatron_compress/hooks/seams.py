"""The names in megatron-core that are replaced, each with the signature it must have (DESIGN D3, HOOKS §4)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from megatron_compress.hooks import context, groups, linear, pipeline, schedule, tensor_parallel

TESTED_VERSIONS = ("0.16.1", "0.19.2")
SUPPORTED = Version("0.14"), Version("0.20")


class UnsupportedMegatronError(RuntimeError):
    """The installed megatron-core is not one that the hooks fit."""


@dataclass(frozen=True)
class Seam:
    """One replaced name.

    Args:
        module: within megatron.core.
        name: of the attribute; Class.method for a method.
        wrap: makes the replacement from the original.
        parameters: that the original must have, in this order; more may follow only where `wrap` passes them on.
    """

    module: str
    name: str
    wrap: Callable[[Any], Any]
    parameters: tuple[str, ...] = ()

    def locate(self) -> tuple[Any, str, Any]:
        """Owner, attribute and what is there now (a staticmethod object for a static method)."""
        owner: Any = importlib.import_module(f"megatron.core.{self.module}")
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, attribute, vars(owner)[attribute]

    def mismatch(self) -> str | None:
        """What is not as expected, or None."""
        where = f"megatron.core.{self.module}.{self.name}"
        try:
            original = _function(self.locate()[2])
        except (ImportError, AttributeError, KeyError):
            return f"{where} does not exist"
        if not self.parameters:
            return None
        found = tuple(inspect.signature(original).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"{where} takes ({', '.join(found)}), expected ({', '.join(self.parameters)}, ...)"
        return None

    def apply(self) -> Callable[[], None]:
        """Replace the name; returns what puts the original back."""
        owner, attribute, original = self.locate()
        function = _function(original)
        replacement = self.wrap(function)
        if callable(function):
            replacement = wraps(function)(replacement)
        setattr(owner, attribute, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
        return lambda: setattr(owner, attribute, original)


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute


_P2P = (
    "tensor_send_prev",
    "tensor_recv_prev",
    "tensor_send_next",
    "tensor_recv_next",
    "group",
    "prev_pipeline_rank",
    "next_pipeline_rank",
)
_FUNCTIONS = {
    "tensor_parallel.mappings": (
        "_CopyToModelParallelRegion",
        "_ReduceFromModelParallelRegion",
        "_ScatterToModelParallelRegion",
        "_GatherFromModelParallelRegion",
        "_ScatterToSequenceParallelRegion",
        "_GatherFromSequenceParallelRegion",
        "_ReduceScatterToSequenceParallelRegion",
        "_AllGatherFromTensorParallelRegion",
        "_ReduceScatterToTensorParallelRegion",
    ),
    "tensor_parallel.layers": ("LinearWithFrozenWeight", "LinearWithGradAccumulationAndAsyncCommunication"),
}


def seams() -> list[Seam]:
    """Every seam, in the order in which it is applied."""
    transport = [
        Seam("pipeline_parallel.p2p_communication", "_batched_p2p_ops", pipeline.p2p_ops, _P2P),
        Seam("pipeline_parallel.p2p_communication", "_p2p_ops", pipeline.p2p_ops, _P2P),
        Seam("tensor_parallel.mappings", "_reduce", tensor_parallel.reduce, ("input_", "group")),
        Seam("tensor_parallel.mappings", "dist_all_gather_func", tensor_parallel.all_gather),
        Seam("tensor_parallel.mappings", "dist_reduce_scatter_func", tensor_parallel.reduce_scatter),
        Seam("tensor_parallel.layers", "dist_all_gather_func", _regather),
        Seam("tensor_parallel.layers", "dist_reduce_scatter_func", tensor_parallel.reduce_scatter),
        Seam("tensor_parallel.layers", "torch", _torch_stand_in),
    ]
    functions = [
        Seam(module, f"{name}.{method}", wrap, ("ctx",))
        for module, names in _FUNCTIONS.items()
        for name in names
        for method, wrap in (("forward", context.function_forward), ("backward", context.function_backward))
    ]
    layers = [
        Seam("tensor_parallel.layers", f"{name}.forward", groups.layer_forward, ("self", "input_"))
        for name in ("VocabParallelEmbedding", "ColumnParallelLinear", "RowParallelLinear")
    ]
    products = [
        Seam("tensor_parallel.layers", f"{name}._forward_impl", linear.forward_impl, ("self", "input", "weight"))
        for name in ("ColumnParallelLinear", "RowParallelLinear")
    ]
    sites = [
        Seam(
            "tensor_parallel.layers", "VocabParallelEmbedding.forward", context.module_forward("embedding"), ("self",)
        ),
        Seam("transformer.attention", "Attention.forward", context.module_forward("attention"), ("self",)),
        Seam("transformer.mlp", "MLP.forward", context.module_forward("mlp"), ("self",)),
        Seam(
            "tensor_parallel.layers",
            "ColumnParallelLinear.forward",
            context.column_linear_forward,
            ("self", "input_", "weight"),
        ),
    ]
    schedules = [
        Seam("pipeline_parallel.schedules", name, wrap, ("forward_step_func", "data_iterator", "model"))
        for name, wrap in (
            ("forward_backward_no_pipelining", partial(schedule.schedule, pipelined=False)),
            ("forward_backward_pipelining_without_interleaving", partial(schedule.schedule, overlapping=True)),
            ("forward_backward_pipelining_with_interleaving", schedule.schedule),
        )
    ]
    return transport + functions + layers + products + sites + schedules


def check(found: list[Seam]) -> str:
    """Check version and signatures; returns a line for the log.

    Raises:
        UnsupportedMegatronError: megatron-core is missing, out of range, or a name is not as expected.
    """
    try:
        from megatron.core import __version__ as version
    except ImportError as error:
        raise UnsupportedMegatronError(
            f"megatron-core cannot be imported ({error}); install it: pip install megatron-core=={TESTED_VERSIONS[-1]}"
        ) from error
    if not SUPPORTED[0] <= Version(version) < SUPPORTED[1]:
        raise UnsupportedMegatronError(
            f"megatron-core {version} is not supported: install {' or '.join(TESTED_VERSIONS)} (tested), "
            f"or another from {SUPPORTED[0]} up to but not {SUPPORTED[1]}"
        )
    if mismatches := [mismatch for seam in found if (mismatch := seam.mismatch())]:
        raise UnsupportedMegatronError(
            f"megatron-core {version} is not as the hooks expect: {'; '.join(mismatches)}; "
            f"install {' or '.join(TESTED_VERSIONS)}"
        )
    return f"megatron-core {version}" + ("" if version in TESTED_VERSIONS else " (untested; all signatures match)")


def _regather(original: Callable) -> Callable:
    return tensor_parallel.all_gather(original, direction="forward")


class _StandIn(ModuleType):
    """A module with some attributes of its own; all others are those of the module it stands for."""

    def __init__(self, module: ModuleType, **own: Any):
        super().__init__(module.__name__)
        self.__dict__.update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _torch_stand_in(original: ModuleType) -> ModuleType:
    """`torch` as `layers` sees it, with our `torch.distributed.all_reduce`, which it calls in line."""
    all_reduce = tensor_parallel.all_reduce(torch.distributed.all_reduce)
    return _StandIn(original, distributed=_StandIn(torch.distributed, all_reduce=all_reduce))
