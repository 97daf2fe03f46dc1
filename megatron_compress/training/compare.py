"""Several arms of one experiment, one after the other in the same processes, and what to make of them.

Every arm builds its model anew from the same seed and reads the same microbatches, so that two arms which do the same
arithmetic have the same losses to the bit, and any other difference between arms comes from compression.
"""

from __future__ import annotations

import gc
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_compress.training.config import ArmConfig, Experiment
from megatron_compress.training.data import Corpus
from megatron_compress.training.distributed import is_first_rank
from megatron_compress.training.loop import RunResult, train
from megatron_compress.training.prepared import Blend
from megatron_compress.training.provenance import provenance

_FINAL_STEPS = 20  # the final training loss is a mean over so many steps, as one step's batch is small


@dataclass(frozen=True)
class Arm:
    """An arm with its result and the few numbers that are read off it. Losses are in nats per token."""

    config: ArmConfig
    result: RunResult

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def train_loss(self) -> float:
        """Mean over the last steps."""
        return statistics.fmean(step.loss for step in self.result.steps[-_FINAL_STEPS:])

    @property
    def held_out_loss(self) -> float:
        return self.result.held_out[-1].held_out_loss

    @property
    def tokens_per_second(self) -> float:
        """Of the median step."""
        return statistics.median(step.tokens_per_second for step in self.result.steps)

    @property
    def seconds(self) -> float:
        """Spent in training steps."""
        return sum(step.seconds for step in self.result.steps)


@dataclass(frozen=True)
class Equality:
    """Whether `arm` repeated the losses of `reference` to the bit; `first_difference` is a step, or None."""

    arm: str
    reference: str
    num_steps: int
    first_difference: int | None

    def __str__(self) -> str:
        if self.first_difference is None:
            return f"{self.arm}: the losses of all {self.num_steps} steps equal those of {self.reference} to the bit"
        return f"{self.arm}: the loss of step {self.first_difference} differs from that of {self.reference}"


def run_arms(experiment: Experiment, data: Corpus | Blend, out: Path) -> list[Arm]:
    """Train every arm of the experiment in turn. Called by every rank; the first one logs to `out`."""
    arms = []
    for config in experiment.train.arms:
        arms.append(Arm(config, train(experiment, data, config, out)))
        gc.collect()  # the finished model is full of reference cycles; the next one wants its memory
    return arms


def check_equalities(arms: list[Arm]) -> list[Equality]:
    """Compare each arm that `equals` another with it, over the steps that both have."""
    by_name = {arm.name: arm for arm in arms}
    return [_compare(arm, by_name[arm.config.equals]) for arm in arms if arm.config.equals is not None]


def _compare(arm: Arm, reference: Arm) -> Equality:
    pairs = list(zip(arm.result.steps, reference.result.steps, strict=False))
    different = [mine.step for mine, other in pairs if mine.loss_hex != other.loss_hex]
    return Equality(arm.name, reference.name, len(pairs), min(different, default=None))


def write_results(
    path: Path, experiment: Experiment, data: Corpus | Blend, arms: list[Arm], equal: list[Equality]
) -> None:
    """All that is known about the arms, as JSON. Called by the first rank."""
    results = {
        **provenance(),
        "config": {"train": experiment.train.model_dump(), "model": experiment.model.model_dump()},
        "text": data.describe(),
        "arms": [_as_json(arm) for arm in arms],
        "equalities": [asdict(item) for item in equal],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _as_json(arm: Arm) -> dict:
    return {
        "name": arm.name,
        "compress": arm.config.compress,
        "final_train_loss": arm.train_loss,
        "held_out_loss": arm.held_out_loss,
        "tokens_per_second": arm.tokens_per_second,
        "seconds": arm.seconds,
        "peak_memory_gib": arm.result.peak_memory_gib,
        "report": None if arm.result.report is None else arm.result.report.to_json(),
        "held_out": [asdict(record) for record in arm.result.held_out],
        "steps": [asdict(record) for record in arm.result.steps],
    }


def compare(experiment: Experiment, data: Corpus | Blend, out: Path) -> bool:
    """Run all arms; the first rank prints the tables and writes results.json and curves.png to `out`.

    Returns:
        Whether every arm that had to equal another did. The same on every rank.
    """
    arms = run_arms(experiment, data, out)
    equal = check_equalities(arms)
    if is_first_rank():
        from megatron_compress.training import summary  # matplotlib is slow to import, and one rank draws

        write_results(out / "results.json", experiment, data, arms, equal)
        summary.draw_curves(out / "curves.png", arms, data.tokenizer.unit)
        summary.print_summary(arms, equal, out, data.tokenizer.unit)
    return all(item.first_difference is None for item in equal)
