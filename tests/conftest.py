"""What decides which tests run: `gpu` and `two_gpus` tests need CUDA devices, `slow` tests need --full."""

import os

import hypothesis
import pytest
import torch

# Asks the driver's library instead of CUDA whether there is a GPU: worker processes are forked after that.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# Shared machines are slow at times, and a test must give the same answer every time.
hypothesis.settings.register_profile("repository", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repository")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", pytest.mark.skip(reason="no CUDA device")))
    if torch.cuda.device_count() < 2:
        skips.append(("two_gpus", pytest.mark.skip(reason="fewer than two CUDA devices")))
    if not config.getoption("--full"):
        skips.append(("slow", pytest.mark.skip(reason="slow; runs with --full")))
    for item in items:
        for marker, skip in skips:
            if marker in item.keywords:
                item.add_marker(skip)
