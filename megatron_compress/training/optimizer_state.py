"""The optimizer's part of a checkpoint: parameter by parameter, so that a run in another layout can read it too.

megatron-core's distributed optimizer (0.16 to 0.19) does not get torch's Adam back whole: it hands one `step` tensor to
all parameters, which every update then counts up once a parameter, and it looks for a `step` in each parameter's state,
where it has written none. Here Adam's steps are put aside while megatron-core reads, and set one by one afterwards.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def sharded(optimizer, model: dict) -> dict:
    """What to save. `model` is the sharded state of the optimizer's model."""
    return optimizer.sharded_state_dict(model, metadata=_FORMAT)


def sharded_to_load(optimizer, model: dict) -> dict:
    """What to read, of a checkpoint that `sharded` was saved in; a fresh optimizer gets a state to read it into."""
    for part in _distributed(optimizer):
        if not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()
    return optimizer.sharded_state_dict(model, is_loading=True, metadata=_FORMAT)


def load(optimizer, state: dict) -> None:
    """Set what was read."""
    parts = _distributed(optimizer)
    if not parts:
        optimizer.load_state_dict(state)
        return
    for i, part in enumerate(parts):
        _load_distributed(part, state if len(parts) == 1 else state[i])


def _load_distributed(optimizer: DistributedOptimizer, state: dict) -> None:
    optimizer.load_state_dict({key: value for key, value in state.items() if not key.startswith("param_state")})
    adam = optimizer.optimizer.state
    steps = {parameter: float(values.pop("step")) for parameter, values in adam.items() if "step" in values}
    optimizer.load_parameter_state_from_fully_reshardable(state["param_state"])
    for parameter, step in steps.items():
        adam[parameter]["step"] = torch.tensor(step)


def _distributed(optimizer) -> list[DistributedOptimizer]:
    """All parts of an optimizer, or none: megatron-core makes either all of them distributed, or none."""
    return [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
