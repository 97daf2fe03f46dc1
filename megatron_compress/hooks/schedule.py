"""Megatron's forward-backward schedules: one call is one training step, or one evaluation."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.utils import get_model_config

from megatron_compress.hooks import active
from megatron_compress.hooks.refusals import refuse_unsupported


def schedule(original: Callable) -> Callable:
    """Wrap a schedule: check the model's configuration on the first call, count training steps (`first_step`)."""
    checked = False

    def forward_backward(*args, **kwargs):
        nonlocal checked
        session = active.session()
        if not checked:
            models = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
            refuse_unsupported(get_model_config(models[0]), session.config)
            checked = True
        try:
            result = original(*args, **kwargs)
        except RuntimeError as error:
            # A lost peer shows as a closed connection somewhere; say which rank it was.
            active.installed().watch.explain(error)
            raise
        # Evaluation uses the same rules and advances nothing (DESIGN D12).
        if not kwargs.get("forward_only", False):
            session.step += 1
        return result

    return forward_backward
