"""The handle that a collective returns."""

from __future__ import annotations

from collections.abc import Generator

import torch


class Work:
    """Runs a collective written as a generator: every yielded `torch.distributed` handle is waited for, in turn.

    The first transfer is in flight when the constructor returns; `wait()` sees the rest through, so what it decodes
    is in place when it returns. The generator's frame keeps its buffers alive until then, also where Megatron frees
    the tensor that was sent. `wait()` is idempotent, as Megatron's schedules need (HOOKS §2c).
    """

    def __init__(self, steps: Generator):
        self._steps: Generator | None = steps
        self._advance()

    def wait(self) -> None:
        """Block until every transfer has ended and the result is decoded in place."""
        while self._steps is not None:
            self._pending.wait()
            self._advance()

    def is_completed(self) -> bool:
        """Whether `wait()` has finished the job."""
        return self._steps is None

    def _advance(self) -> None:
        with torch.no_grad():
            try:
                self._pending = next(self._steps)
            except StopIteration:
                self._steps = self._pending = None


def finished() -> Work:
    """A handle with nothing to wait for."""
    return Work(_nothing())


def _nothing() -> Generator:
    yield from ()
