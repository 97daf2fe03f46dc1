"""This process among the others: its device, Megatron's process groups, its random seeds, and how it ends."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state, tensor_parallel

from megatron_compress.peers import Watch
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.checkpoint import CheckpointError
from megatron_compress.training.config import ParallelConfig

# A rank that is gone for so long ends all others; torchrun does it at once, but only on the machine where it died.
_LOST_SECONDS = 30.0
_watch: Watch


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def initialize(parallel: ParallelConfig, deterministic: bool = False) -> None:
    """Join the process group that torchrun describes and lay Megatron's groups over it: NCCL with CUDA, else gloo.

    Args:
        deterministic: refuse kernels whose results vary from call to call; without CUDA there are none anyway.

    Raises:
        ConfigError: not started by torchrun, or by a number of processes that suits neither layout nor GPUs.
    """
    _check_world(parallel)
    if deterministic:
        _be_deterministic()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    global _watch
    _watch = Watch(digest="", version=megatron_version, timeout=_LOST_SECONDS)
    _watch.start()
    lay_out(parallel)


def lay_out(parallel: ParallelConfig) -> None:
    """Make Megatron's groups of the ranks that have joined."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        create_gloo_process_groups=False,
    )


def stand_alone() -> None:
    """Describe this process as the only one, as torchrun would."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR="127.0.0.1")


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    os.environ.setdefault("NCCL_ALGO", "Ring")  # else NCCL may choose by timing, and sum in another order
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # for debugging, and costs time


def _check_world(parallel: ParallelConfig) -> None:
    unit = parallel.tensor * parallel.pipeline
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"this command runs in several processes: start it with `torchrun --nproc-per-node {unit} -m"
            " megatron_compress ...` or with scripts/pretrain.sh"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size % unit:
        raise ConfigError(
            f"{world_size} processes cannot hold parallel.tensor x parallel.pipeline = {parallel.tensor} x"
            f" {parallel.pipeline}; start a multiple of {unit}"
        )
    local_size, num_gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if torch.cuda.is_available() and local_size > num_gpus:
        raise ConfigError(
            f"{local_size} processes cannot share {num_gpus} GPUs; start one a GPU, or set CUDA_VISIBLE_DEVICES to"
            " nothing to train on the CPU"
        )


def finalize() -> None:
    """Leave the process groups."""
    _watch.stop()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Reset every random state of this rank. Pipeline stages differ; tensor-parallel ranks share weights' states."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def is_first_rank() -> bool:
    return torch.distributed.get_rank() == 0


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Call `run` and end the process with the status that it returns; 2 for a wrong config, 1 for a failure.

    A failed rank ends at once, without the clean-up in which it could wait for the others; torchrun then stops them.
    """
    try:
        status = run()
    except ConfigError as error:
        status = _report_config_error(error)
    except CheckpointError as error:
        print(f"rank {os.environ.get('RANK', 0)}: error: {error}", file=sys.stderr)
        status = 1
    except BaseException:
        print(f"rank {os.environ.get('RANK', 0)} failed:", file=sys.stderr)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report_config_error(error: ConfigError) -> int:
    """Every rank finds the same error; one on each machine says so, and the others leave it the time to."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"error: {error}", file=sys.stderr)
    else:
        time.sleep(2)
    return 2
