"""The CUDA sources compile without a warning: needs nvcc and a CUDA build of torch, but no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from megatron_compress.ops import extension

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA"),
]

# As torch compiles them, but for two switches: warnings are errors, and nothing is optimized, which takes minutes.
NVCC = [
    *extension.NVCC_FLAGS,
    *cpp_extension.COMMON_NVCC_FLAGS,
    *("-gencode", "arch=compute_90,code=compute_90", "-Xcicc", "-O0", "-Werror", "all-warnings", "-Xcompiler", "-Wall"),
]
CXX = ["-fsyntax-only", "-Werror", *extension.CXX_FLAGS]


def _include_folders() -> list[str]:
    """What lies beside torch, and the toolkit's own, by nvcc's word: the command may be a wrapper somewhere else."""
    plan = subprocess.run(
        ["nvcc", "--dryrun", "-c", str(extension.sources()[0])], capture_output=True, text=True, check=True
    )
    toolkit = re.search(r"TOP=(\S+)", plan.stderr)[1]
    beside = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/include"))
    return [*cpp_extension.include_paths(), *map(str, beside), f"{toolkit}/include"]


@pytest.mark.parametrize("source", extension.sources(), ids=lambda path: path.name)
def test_compiles_without_warnings(source, tmp_path):
    # System folders: warnings in other people's headers are not ours.
    folders = [part for folder in _include_folders() for part in ("-isystem", folder)]
    if source.suffix == ".cu":
        command = ["nvcc", "-c", str(source), "-o", str(tmp_path / "object"), *NVCC, *folders]
    else:
        command = ["c++", str(source), *CXX, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
