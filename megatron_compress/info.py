"""`python -m megatron_compress info`: versions, devices, kernels and hooks, each with a tick or the reason."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_compress import __version__

Line = tuple[str, bool, str]


def run() -> None:
    """Print a table: what it is, whether it would be used, and what there is or why not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, there, what in [*_packages(), *_devices(), _kernels(), *_transports(), _hooks()]:
        table.add_row(name, "✓" if there else "✗", what)
    Console(highlight=False, markup=False).print(table)


def _packages() -> Iterator[Line]:
    yield "python", True, platform.python_version()
    yield "megatron-compress", True, __version__
    for name in ("torch", "megatron-core", "transformer-engine"):
        try:
            yield name, True, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, False, "not installed"


def _devices() -> Iterator[Line]:
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        yield "GPU", False, f"none (torch is built with {built}); models run on the CPU"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        peers = [
            peer
            for peer in range(torch.cuda.device_count())
            if peer != index and torch.cuda.can_device_access_peer(index, peer)
        ]
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        reach = f"reaches the memory of {peers}" if peers else "reaches no other GPU's memory"
        yield f"GPU {index}", True, f"{properties.name}, sm_{properties.major}{properties.minor}, {memory}, {reach}"


def _kernels() -> Line:
    if not torch.cuda.is_available():
        return "CUDA kernels", False, "no GPU: compressors run as their PyTorch reference"
    from megatron_compress.ops import extension

    loaded = extension.load()
    return "CUDA kernels", loaded, extension.status()


def _transports() -> Iterator[Line]:
    nccl = dist.is_available() and dist.is_nccl_available()
    if nccl and torch.cuda.is_available():
        yield "NCCL", True, ".".join(map(str, torch.cuda.nccl.version()))
    else:
        yield "NCCL", False, "no GPU" if nccl else "not in this build of torch"
    gloo = dist.is_available() and dist.is_gloo_available()
    yield "gloo", gloo, "for models on the CPU" if gloo else "not in this build of torch"


def _hooks() -> Line:
    try:
        from megatron_compress.hooks.seams import check, seams

        found = seams()
        version = check(found)
    except (ImportError, RuntimeError) as error:
        return "hooks", False, str(error)
    return "hooks", True, f"all {len(found)} names of {version} are as expected"
