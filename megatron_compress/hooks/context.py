"""Which direction and which part of the model is running (DESIGN D3).

The functions that communicate serve both directions and every module, so the autograd Functions and modules around
them note here what they are. A Function's forward also stores the site on its `ctx`, for its backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Context(threading.local):
    direction: str | None = None
    site: str | None = None


_context = _Context()


def direction() -> str | None:
    """forward or backward inside an autograd Function that communicates, else None."""
    return _context.direction


def site() -> str | None:
    """embedding, attention, mlp, head, or None in any other part of the model."""
    return _context.site


@contextmanager
def running(direction: str | None, site: str | None) -> Iterator[None]:
    """Note direction and site for the duration of a with block; blocks nest, as recompute runs forwards in backward."""
    before = _context.direction, _context.site
    _context.direction, _context.site = direction, site
    try:
        yield
    finally:
        _context.direction, _context.site = before


def function_forward(original: Callable) -> Callable:
    """Wrap the forward of an autograd Function."""

    def forward(ctx, *args, **kwargs):
        ctx.compression_site = site()
        with running("forward", site()):
            return original(ctx, *args, **kwargs)

    return forward


def function_backward(original: Callable) -> Callable:
    """Wrap the backward of an autograd Function."""

    def backward(ctx, *grads):
        with running("backward", getattr(ctx, "compression_site", None)):
            return original(ctx, *grads)

    return backward


def module_forward(name: str) -> Callable[[Callable], Callable]:
    """Wrap the forward of a module class that is the site `name`."""

    def wrap(original: Callable) -> Callable:
        def forward(self, *args, **kwargs):
            with running(direction(), name):
                return original(self, *args, **kwargs)

        return forward

    return wrap


def column_linear_forward(original: Callable) -> Callable:
    """Wrap ColumnParallelLinear.forward: outside attention and MLP it is the vocabulary head if Megatron says so."""

    def forward(self, input_, weight=None, *args, **kwargs):
        used = self.weight if weight is None else weight
        head = site() is None and getattr(used, "is_embedding_or_output_parameter", False)
        with running(direction(), "head" if head else site()):
            return original(self, input_, weight, *args, **kwargs)

    return forward
