"""Reading files that somebody else may have written: nothing in them may run (no arbitrary pickles)."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path


class UnsafeFileError(RuntimeError):
    """A file asks for code that plain checkpoints do not need."""


# All that the index of a torch_dist checkpoint consists of.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device", "float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "bool"}
    | {"uint8"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise UnsafeFileError(f"refers to {module}.{name}")


def check_metadata(file: Path) -> None:
    """See that a checkpoint's `.metadata`, which torch unpickles without a look, only holds an index of tensors.

    Raises:
        UnsafeFileError: it holds anything else.
    """
    with file.open("rb") as opened:
        try:
            _Unpickler(opened).load()
        except UnsafeFileError as error:
            raise UnsafeFileError(f"{file}: {error}, which no checkpoint's index needs, so it was not read") from None


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Inside, every `torch.load` in this process refuses all but tensors and plain values, whatever its caller says."""
    names = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
