"""Builds the CUDA kernels ahead of time where nvcc and a CUDA build of torch are at hand; else they are compiled at
first use. pyproject.toml says everything else.

Build with `pip install --no-build-isolation .`, so that torch is visible here. Switches, in the environment:
  MEGATRON_COMPRESS_CUDA   0: do not build; 1: an error if they cannot be built
  TORCH_CUDA_ARCH_LIST     compute capabilities to build for (default here: 8.0 9.0+PTX)
  MAX_JOBS                 files compiled at once
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import setup


def extensions() -> tuple[list, dict]:
    """ext_modules and cmdclass, and one line on standard error that says what is built or why nothing is."""
    wish = os.environ.get("MEGATRON_COMPRESS_CUDA", "")
    reason = "MEGATRON_COMPRESS_CUDA=0" if wish == "0" else _missing()
    if reason:
        if wish == "1":
            sys.exit(f"setup.py: MEGATRON_COMPRESS_CUDA=1, but {reason}")
        print(f"setup.py: CUDA kernels are not built: {reason}", file=sys.stderr)
        return [], {}
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    how = _extension_module()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0 9.0+PTX")
    files = [str(path.relative_to(Path(__file__).parent)) for path in how.sources()]
    print(f"setup.py: building {len(files)} files for {os.environ['TORCH_CUDA_ARCH_LIST']}", file=sys.stderr)
    flags = {"cxx": how.CXX_FLAGS, "nvcc": how.NVCC_FLAGS}
    module = CUDAExtension(f"megatron_compress.{how.NAME}", files, extra_compile_args=flags)
    return [module], {"build_ext": BuildExtension}


def _missing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed where the build runs (--no-build-isolation shows it)"
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None:
        return "this torch has no CUDA"
    return None if CUDA_HOME else "nvcc was not found; set CUDA_HOME"


def _extension_module():
    """megatron_compress/ops/extension.py, which names sources and flags, without importing the package."""
    path = Path(__file__).resolve().parent / "megatron_compress" / "ops" / "extension.py"
    spec = importlib.util.spec_from_file_location("extension", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


modules, commands = extensions()
setup(ext_modules=modules, cmdclass=commands)
