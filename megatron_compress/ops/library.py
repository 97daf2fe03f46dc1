"""The ops' place in torch: schemas, the reference as their CPU kernel, and CUDA kernels once they are needed.

Each op writes into tensors of the caller and returns nothing, so that tracing needs no more than its schema.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megatron_compress.ops import extension

NAMESPACE = "megatron_compress"

_library = torch.library.Library(NAMESPACE, "DEF")
# Kernels that stand in on CUDA until the extension is loaded.
_waiting = torch.library.Library(NAMESPACE, "IMPL")
_references: dict[str, Callable] = {}
_lock = threading.Lock()
# Whether the extension serves CUDA; None while nobody has needed it.
_extension: bool | None = None


def register(schema: str, reference: Callable) -> Callable:
    """Define `schema` (of torch.library, with (a!) on what is written) and return the op to call.

    Args:
        reference: the PyTorch function of that signature whose bytes the CUDA kernel must give (DESIGN D7).
    """
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, reference, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None, lib=_library)
    _references[name] = reference
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def first_call(*args):
        ready()
        op(*args)

    if _extension is None:
        _waiting.impl(name, first_call, "CUDA")
    elif not _extension:
        _library.impl(name, reference, "CUDA")
    return op


def ready() -> None:
    """Load, or else build, the CUDA kernels; where that cannot be, the reference runs on CUDA too, and it is said."""
    global _extension
    with _lock:
        if _extension is not None:
            return
        _waiting._destroy()
        _extension = extension.load()
        if not _extension:
            for name, reference in _references.items():
                _library.impl(name, reference, "CUDA")
