"""Megatron's forward-backward schedules: one call is one training step, or one evaluation."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.utils import get_model_config

from megatron_compress.hooks import active, groups, pipeline
from megatron_compress.hooks.overlap import Overlap
from megatron_compress.hooks.refusals import (
    refuse_bypassed,
    refuse_communicator,
    refuse_layers,
    refuse_unknown_samples,
    refuse_unsupported,
)


def schedule(original: Callable, pipelined: bool = True, overlapping: bool = False) -> Callable:
    """Wrap a schedule: check what it is called with, see all its sends end, count training steps (`first_step`).

    Args:
        pipelined: whether the schedule is one with pipeline messages.
        overlapping: whether these may leave its critical path (`hooks.overlap`).
    """

    def forward_backward(*args, **kwargs):
        session, current = active.session(), active.installed()
        evaluating = kwargs.get("forward_only", False)
        _check(session.config, **kwargs)
        if session.config.remembers and not evaluating:
            refuse_unknown_samples(session.samples, kwargs["num_microbatches"])
        session.evaluating = evaluating
        current.exchanged.clear()
        current.sends.clear()
        current.overlap = Overlap.of(groups.pipeline_group(), **kwargs) if overlapping else None
        try:
            result = original(*args, **kwargs)
            pipeline.finish_sends()
        except RuntimeError as error:
            # A lost peer shows as a closed connection somewhere; say which rank it was.
            current.watch.explain(error)
            raise
        finally:
            current.overlap, session.samples = None, None
        if pipelined:
            refuse_bypassed(groups.pipeline_group(), set(current.exchanged), evaluating)
        # Evaluation uses the same rules and advances nothing (DESIGN D12).
        if not evaluating:
            session.step += 1
        return result

    return forward_backward


def _check(compression, *, model, p2p_communicator=None, pg_collection=None, **_) -> None:
    chunks = model if isinstance(model, list) else [model]
    refuse_communicator(p2p_communicator)
    refuse_unsupported(get_model_config(chunks[0]), compression)
    if unseen := set(chunks) - set(active.installed().checked):  # a walk over all modules, once a model
        refuse_layers(unseen, compression)
        active.installed().checked.update(unseen)
    groups.note_pipeline(p2p_communicator, pg_collection)
