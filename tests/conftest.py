"""What decides which tests run: `gpu` tests need a CUDA device, `slow` tests need --full."""

import hypothesis
import pytest
import torch

# Shared machines are slow at times, and a test must give the same answer every time.
hypothesis.settings.register_profile("repository", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repository")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", pytest.mark.skip(reason="no CUDA device")))
    if not config.getoption("--full"):
        skips.append(("slow", pytest.mark.skip(reason="slow; runs with --full")))
    for item in items:
        for marker, skip in skips:
            if marker in item.keywords:
                item.add_marker(skip)
