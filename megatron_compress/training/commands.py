"""What each training command does on every rank: read the files, join the others, run, leave."""

from __future__ import annotations

from pathlib import Path

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training import distributed
from megatron_compress.training.compare import Arm
from megatron_compress.training.compare import compare as compare_arms
from megatron_compress.training.config import ArmConfig, Experiment, load_experiment
from megatron_compress.training.data import Corpus, load_corpus
from megatron_compress.training.loop import train as train_arm


def train(config: Path, out: Path, compress: Path | None, text: Path | None, steps: int | None) -> int:
    """Train one model; the exit status."""
    experiment, corpus = _load(config, text)
    if steps is not None:
        experiment = experiment.with_steps(steps)
    arm = ArmConfig(name="train", compress=None if compress is None else str(compress.resolve()))
    distributed.initialize(experiment.train.parallel)
    result = Arm(arm, train_arm(experiment, corpus, arm, out))
    if distributed.is_first_rank():
        print(f"{len(result.result.steps)} steps in {result.seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s")
        print(f"held-out loss {result.held_out_loss:.4f} nats per byte")
        print(f"wrote {out / 'train.jsonl'}")
    distributed.finalize()
    return 0


def compare(config: Path, out: Path, text: Path | None) -> int:
    """Train and compare all arms; the exit status is 1 if an arm that must equal another does not."""
    experiment, corpus = _load(config, text)
    if not experiment.train.arms:
        raise ConfigError(f"{config}: there are no `arms` to compare; use the command `train`, or add some")
    distributed.initialize(experiment.train.parallel)
    equal = compare_arms(experiment, corpus, out)
    distributed.finalize()
    return 0 if equal else 1


def _load(config: Path, text: Path | None) -> tuple[Experiment, Corpus]:
    experiment = load_experiment(config)
    data = experiment.train.data
    return experiment, load_corpus(text, data.held_out_fraction, data.sequence_length)
