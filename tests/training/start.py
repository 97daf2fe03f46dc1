"""The package's commands in processes of their own, as a user starts them."""

import os
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
PACKAGE = ["-m", "megatron_compress"]


def torchrun(num_ranks: int, *arguments) -> list[str]:
    """The command line that starts a script or module on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, *arguments]
    return [str(argument) for argument in command]


def python(*arguments) -> list[str]:
    """The command line of a process alone."""
    return [sys.executable, *map(str, arguments)]


def run(command: list[str], timeout: float = 250) -> subprocess.CompletedProcess:
    """To its end; what it says on stdout and stderr is kept."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)
