"""The compiled CUDA kernels: found beside the package if setup.py built them, else compiled at first use."""

from __future__ import annotations

import importlib.machinery
import logging
import os
import time
from pathlib import Path

import torch
from torch.utils import cpp_extension

logger = logging.getLogger(__name__)

NAME = "megatron_compress_kernels"
SOURCES = Path(__file__).parents[1] / "csrc"
# A multiply and an add stay two roundings, as in the reference (DESIGN D7).
NVCC_FLAGS = ["-O3", "-std=c++17", "--fmad=false", "--expt-relaxed-constexpr"]
CXX_FLAGS = ["-O2", "-std=c++17", "-Wall"]

# What `status` says of the kernels.
_status = "not needed yet"


def status() -> str:
    """Where the CUDA kernels come from, or why there are none."""
    return _status


def load() -> bool:
    """Make the CUDA kernels available to the ops; whether that worked. `status` says how.

    MEGATRON_COMPRESS_CUDA=0 keeps the reference; =1 makes a failure an error.

    Raises:
        RuntimeError: MEGATRON_COMPRESS_CUDA=1 and the kernels cannot be had.
    """
    global _status
    wish = os.environ.get("MEGATRON_COMPRESS_CUDA", "")
    if wish == "0":
        _status = "reference: MEGATRON_COMPRESS_CUDA=0"
        return False
    try:
        _status = _load_built() or _compile()
        return True
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        _status = f"reference: {reason}"
        if wish == "1":
            raise RuntimeError(f"MEGATRON_COMPRESS_CUDA=1, but the CUDA kernels cannot be had: {error}") from error
        logger.warning(
            "no CUDA kernels (%s): compressors run as their PyTorch reference, which is right but slow; "
            "install nvcc of CUDA %s or set CUDA_HOME",
            reason,
            torch.version.cuda,
        )
        return False


def _load_built() -> str | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = SOURCES.parent / f"{NAME}{suffix}"
        if path.exists():
            torch.ops.load_library(path)
            return f"built with the package: {path.name}"
    return None


def _compile() -> str:
    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError("nvcc was not found")
    logger.warning("compiling the CUDA kernels, once for this version of torch: a minute or two")
    start = time.monotonic()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ".".join(map(str, torch.cuda.get_device_capability())))
    cpp_extension.load(
        NAME,
        [str(path) for path in sources()],
        extra_cflags=CXX_FLAGS,
        extra_cuda_cflags=NVCC_FLAGS,
        is_python_module=False,
    )
    seconds = time.monotonic() - start
    logger.warning("CUDA kernels ready after %.0f s", seconds)
    return f"compiled at first use, {seconds:.0f} s"


def sources() -> list[Path]:
    """The files to compile."""
    return sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cpp")])
