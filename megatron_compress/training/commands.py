"""What each training command does on every rank: read the files, join the others, run, leave."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training import distributed
from megatron_compress.training.compare import Arm, write_results
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
        write_results(out / "results.json", experiment, corpus, [result], [])
        _print_run(result, out)
    distributed.finalize()
    return 0


def _print_run(arm: Arm, out: Path) -> None:
    console = Console(highlight=False)
    console.print(f"{len(arm.result.steps)} steps in {arm.seconds:.0f} s, {arm.tokens_per_second:,.0f} tokens/s")
    console.print(f"held-out loss {arm.held_out_loss:.4f} nats per byte")
    if arm.result.report is not None:
        console.print(arm.result.report.table(arm.name))
    console.print(f"wrote {out / 'results.json'} and {out / 'train.jsonl'}")


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
