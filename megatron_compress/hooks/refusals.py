"""Settings of Megatron under which traffic would pass the hooks by, or upstream itself is wrong (HOOKS §2f)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_compress.config import CompressionConfig
from megatron_compress.sample_memory import Samples


class UnsupportedSettingError(RuntimeError):
    """A Megatron setting that compression cannot honour."""


def refuse_unsupported(config: Any, compression: CompressionConfig) -> None:
    """Check a model's TransformerConfig, and that the rules fit it.

    Raises:
        UnsupportedSettingError: all that is unsupported, each with the reason and the fix.
    """
    if problems := [*_problems(config), *_misfits(config, compression)]:
        raise UnsupportedSettingError("compression cannot serve this model:\n" + "\n".join(problems))


def refuse_layers(chunks: Iterable[torch.nn.Module], compression: CompressionConfig) -> None:
    """Check that the rules of the tensor axis and of linear layers reach the layers of a model.

    Raises:
        UnsupportedSettingError: it has layers of Transformer-Engine, and there are such rules.
    """
    if not compression.linear and not any(rule for axis, _, rule in compression.rules() if axis == "tensor"):
        return
    # A method for linear layers acts on those of one rank as well.
    least = 1 if compression.linear else 2
    foreign = {type(layer) for chunk in chunks for layer in chunk.modules() if getattr(layer, "tp_size", 0) >= least}
    names = sorted({layer.__name__ for layer in foreign if _derives_from_transformer_engine(layer)})
    if names:
        raise UnsupportedSettingError(
            f"{', '.join(names)}: layers of Transformer-Engine multiply and communicate by themselves, beyond the "
            "rules of the tensor axis and of linear layers; build the model of megatron-core's local layer spec, or "
            "leave `tensor` and `linear` out of the file"
        )


def refuse_communicator(communicator: object | None) -> None:
    """Check the `p2p_communicator` that a schedule is called with.

    Raises:
        UnsupportedSettingError: it is not megatron-core's, nor derived from it.
    """
    if communicator is not None and not isinstance(communicator, P2PCommunicator):
        raise UnsupportedSettingError(
            f"p2p_communicator is a {type(communicator).__name__}, whose messages the hooks do not reach (pipelines of "
            "several modules have one of their own); pass a P2PCommunicator, or uninstall compression"
        )


def refuse_bypassed(pipeline: dist.ProcessGroup | None, exchanged: set[str], evaluating: bool) -> None:
    """Check that the messages of a schedule call came through the hooks.

    Args:
        pipeline: the group of the stages.
        exchanged: slots of Megatron's pipeline functions that carried a tensor.

    Raises:
        UnsupportedSettingError: a neighbour was not sent to, or not received from, through the hooks.
    """
    if pipeline is None or pipeline.size() == 1:
        return
    expected = set()
    if pipeline.rank() > 0:
        expected |= {"tensor_recv_prev"} if evaluating else {"tensor_recv_prev", "tensor_send_prev"}
    if pipeline.rank() < pipeline.size() - 1:
        expected |= {"tensor_send_next"} if evaluating else {"tensor_send_next", "tensor_recv_next"}
    if missing := sorted(expected - exchanged):
        raise UnsupportedSettingError(
            f"pipeline messages passed the hooks by: no {', '.join(missing)}; the p2p_communicator moves tensors by "
            "other means than P2PCommunicator._communicate; leave that to the class it derives from"
        )


def refuse_unknown_samples(samples: Samples | None, num_microbatches: int) -> None:
    """Check that it is known which samples a training step is of.

    Raises:
        UnsupportedSettingError: it is not, or not of all microbatches.
    """
    if samples is None:
        raise UnsupportedSettingError(
            "aq_sgd remembers each sample's activation, but nobody says which samples this step is of: in a training "
            "file set data.epoch_windows; where every sample is seen once, or a script of your own trains, use another "
            "compressor (or set session.samples before each step, `install` returns the session)"
        )
    if len(samples.microbatches) != num_microbatches:
        raise UnsupportedSettingError(
            f"session.samples has {len(samples.microbatches)} microbatches, the schedule runs {num_microbatches}"
        )


def _derives_from_transformer_engine(layer: type) -> bool:
    return any(base.__module__.split(".")[0] == "transformer_engine" for base in layer.__mro__)


def _problems(config: Any) -> Iterator[str]:
    if getattr(config, "use_ring_exchange_p2p", False):
        yield "use_ring_exchange_p2p: its transfers are not torch.distributed's; set it to False"
    if getattr(config, "tp_comm_overlap", False):
        yield "tp_comm_overlap: communication happens inside the GEMM, out of reach; set it to False"
    if getattr(config, "symmetric_ar_type", None):
        yield "symmetric_ar_type: Transformer-Engine's own all-reduce would be used; set it to None"
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") not in ("none", None):
        yield "Megatron's CUDA-graph mode replays communication that was captured elsewhere; turn it off"
    interleaved = (getattr(config, "virtual_pipeline_model_parallel_size", None) or 1) > 1
    if config.pipeline_model_parallel_size == 2 and interleaved and config.batch_p2p_comm:
        yield (
            "two pipeline stages, interleaved, with batch_p2p_comm: megatron-core itself swaps activations and "
            "gradients; set batch_p2p_comm=False (and overlap_p2p_comm=True), or use more stages"
        )
    if interleaved and getattr(config, "variable_seq_lengths", False) and not config.overlap_p2p_comm:
        yield (
            "variable_seq_lengths, interleaved, without overlap_p2p_comm: megatron-core's own exchange of shapes "
            "fails or waits for ever; set overlap_p2p_comm=True and batch_p2p_comm=False"
        )


def _misfits(config: Any, compression: CompressionConfig) -> Iterator[str]:
    if compression.remembers and (getattr(config, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
        yield (
            "aq_sgd with the interleaved schedule: which microbatch a message is of is not known there; train without "
            "virtual stages, or use another compressor"
        )
    if compression.linear and getattr(config, "gradient_accumulation_fusion", False):
        yield (
            "linear: gradient_accumulation_fusion has a kernel of its own for the weights' gradients; set it to False"
        )
    stages = config.pipeline_model_parallel_size
    for axis, direction, rule in compression.rules():
        if rule and rule.exempt_stages and rule.exempt_stages[-1] >= stages:
            yield (
                f"{axis} {direction}: exempt_stages has {rule.exempt_stages[-1]}, but the model's {stages} stages are "
                f"0 to {stages - 1}; correct the list"
            )
