"""Lets megatron-core run on a machine without CUDA: gloo collectives, CPU tensors, the same Python code above.

Call `apply()` once a process, before the first `import megatron` (megatron-core 0.17 and later imports triton, which
has to be stubbed first; for earlier versions any time before the first model is built will do). With CUDA it does
nothing. Each shim below names the one upstream assumption that it lifts; HOOKS.md §5 lists them all.

A model for the CPU also needs these config fields, as they select kernels that only exist for CUDA:
`masked_softmax_fusion`, `gradient_accumulation_fusion`, `persist_layer_norm` and `apply_rope_fusion` are False. With
`bias_activation_fusion` and `bias_dropout_fusion` False as well, nothing calls torch.compile, so no C compiler either.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib.util
import logging
import sys
import types
import warnings
from functools import wraps

import torch

_applied = False


def apply() -> None:
    """Install every shim, once; does nothing if CUDA is available."""
    global _applied
    if _applied or torch.cuda.is_available():
        return
    _applied = True
    _ignore_warnings()
    _stub_triton_kernels()
    _shim_devices()
    _shim_streams()
    _shim_sends()
    _shim_tensor_methods()
    _shim_rng()
    shim_norm()
    _shim_moe()


def _ignore_warnings() -> None:
    """megatron-core warns in a dozen places that CUDA packages are missing, and of settings that only CUDA has."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")


def _stub_triton_kernels() -> None:
    """One MoE module of megatron-core >= 0.18 imports triton at its top level, and the schedules import that module.

    The leaf is stubbed, not triton: a fake triton makes torch believe that it has a compiler.
    """
    if importlib.util.find_spec("triton") is None:
        leaf = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        leaf.__getattr__ = lambda name: None  # constants and kernels that dense models never touch
        sys.modules[leaf.__name__] = leaf


def _shim_devices() -> None:
    """Tensors are made with device=torch.cuda.current_device() or the literal "cuda"."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("zeros", "ones", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory):
    @wraps(factory)
    def make(*args, device=None, **kwargs):
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return make


class _Stream:
    """CPU work is done when the call returns, so there is nothing to wait for. It stands for its events too."""

    def wait_stream(self, stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _shim_streams() -> None:
    """Batched p2p synchronizes the device after each message, and DDP asks for the current stream."""
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.Stream = _Stream


def _shim_sends() -> None:
    """Gloo forgets a send whose handle is dropped; the overlapped schedule drops the last ones of an evaluation.

    A stage has no more than a few transfers in flight, so the last 64 handles are as good as all.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    upstream, handles = p2p_communication._p2p_ops, collections.deque(maxlen=64)

    @wraps(upstream)
    def keeping(**kwargs):
        started = upstream(**kwargs)
        handles.extend(started.values())
        return started

    p2p_communication._p2p_ops = keeping


def _shim_tensor_methods() -> None:
    """Tied embeddings call .cuda(), and the optimizers sort parameters by names like 'torch.cuda.FloatTensor'."""
    upstream_type = torch.Tensor.type

    def cuda_type(self, dtype=None, **kwargs):
        if dtype is None:
            return upstream_type(self).replace("torch.", "torch.cuda.", 1)
        return upstream_type(self, dtype, **kwargs)

    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = cuda_type


def _shim_rng() -> None:
    """Weights and dropout draw from the device's generator, which here is the CPU's."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.default_generator.manual_seed
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The tracker's fork warns whenever the CPU generator moves under it, which is now its purpose.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def shim_norm() -> None:
    """The norm that stands in for apex refuses sequence parallelism; its parameters only lack the mark for it.

    Megatron sums the gradients of marked parameters over the tensor-parallel ranks. GPUs without apex need this too.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    upstream_new = WrappedTorchNorm.__new__
    if getattr(upstream_new, "marks_parameters", False):
        return

    def new(cls, config, *args, **kwargs):
        without_sp = copy.copy(config)
        without_sp.sequence_parallel = False
        norm = upstream_new(cls, without_sp, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    new.marks_parameters = True
    WrappedTorchNorm.__new__ = new


def _shim_moe() -> None:
    """Token counts are turned into NumPy arrays, which the all-to-all takes, on their way from CUDA only.

    And 0.16 asks whether a function of Transformer-Engine is None that it has not even named where that is missing.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_asked(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = as_asked
