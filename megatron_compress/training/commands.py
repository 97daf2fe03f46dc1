"""What each training command does on every rank: read the files, join the others, run, leave."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training import distributed
from megatron_compress.training.compare import Arm, write_results
from megatron_compress.training.compare import compare as compare_arms
from megatron_compress.training.config import ArmConfig, Experiment, ParallelConfig, load_experiment
from megatron_compress.training.data import Corpus, load_corpus
from megatron_compress.training.importing import convert
from megatron_compress.training.importing.source import read_source
from megatron_compress.training.loop import Trainer, pretrain
from megatron_compress.training.prepared import Blend, load_blend, prepare
from megatron_compress.training.tokenizer import Tokenizer, digest_of, load_tokenizer


def train(experiment: Experiment, out: Path, compress: Path | None, text: Path | None, resume: bool) -> int:
    """Train one model; the exit status."""
    arm = ArmConfig(name="train", compress=None if compress is None else str(compress.resolve()))
    data = _join_and_load(experiment, text, out)
    result = Arm(arm, pretrain(experiment, data, arm, out, resume))
    if distributed.is_first_rank():
        write_results(out / "results.json", experiment, data, [result], [])
        _print_run(result, out, data.tokenizer.unit)
    distributed.finalize()
    return 0


def _print_run(arm: Arm, out: Path, unit: str) -> None:
    console = Console(highlight=False)
    console.print(f"{len(arm.result.steps)} steps in {arm.seconds:.0f} s, {arm.tokens_per_second:,.0f} tokens/s")
    console.print(f"held-out loss {arm.held_out_loss:.4f} nats per {unit}")
    if arm.result.report is not None:
        console.print(arm.result.report.table(arm.name))
        if remembered := arm.result.report.memory_bytes:
            console.print(f"remembered activations: {remembered / 1e6:,.1f} MB over all ranks")
    console.print(f"wrote {out / 'results.json'} and {out / 'train.jsonl'}")


def compare(experiment: Experiment, out: Path, text: Path | None) -> int:
    """Train and compare all arms; the exit status is 1 if an arm that must equal another does not."""
    if not experiment.train.arms:
        raise ConfigError("there are no `arms` to compare; use the command `train`, or add some to the training file")
    equal = compare_arms(experiment, _join_and_load(experiment, text, out), out)
    distributed.finalize()
    return 0 if equal else 1


def read(config: Path, steps: int | None = None, deterministic: bool = False) -> Experiment:
    """The training file with what the command line changes."""
    experiment = load_experiment(config)
    if steps is not None:
        experiment = experiment.with_steps(steps)
    return experiment.deterministic() if deterministic else experiment


def prepare_text(text: Path | None, out: Path, tokenizer: Path | None, end_token: str | None) -> int:
    """Write a data set in Megatron's format; the exit status."""
    facts = prepare(text, load_tokenizer(tokenizer, end_token), out)
    print(f"wrote {out}.bin and {out}.idx: {facts['documents']:,} documents, {facts['tokens']:,} tokens")
    return 0


def import_model(source: Path, out: Path, tensor: int) -> int:
    """Write a published model as a checkpoint, in a process alone; the exit status."""
    distributed.stand_alone()
    distributed.initialize(ParallelConfig())
    distributed.seed_everything(0)
    difference = convert.import_model(source, out, tensor)
    distributed.finalize()
    print(f"wrote {out}; its logits are those of {source} to {difference:.1e}")
    return 0


def check_model(experiment: Experiment, source: Path, out: Path, text: Path | None) -> int:
    """Compare `init` in the training file's layout with its source; the exit status is 1 if its logits are others."""
    if experiment.train.init is None:
        raise ConfigError("the training file has no `init`; name the folder that import-model wrote")
    data = _join_and_load(experiment, text, out)
    trainer = Trainer(experiment, data)
    difference = convert.largest_difference(experiment, trainer.chunks, read_source(source))
    held_out = trainer.evaluate(0).held_out_loss
    if distributed.is_first_rank():
        print(f"largest difference of a logit {difference:.1e} (allowed: {convert.TOLERANCE:.0e})")
        print(f"held-out loss {held_out:.6f} nats per {data.tokenizer.unit}")
    distributed.finalize()
    return 0 if difference <= convert.TOLERANCE else 1


def _join_and_load(experiment: Experiment, text: Path | None, out: Path) -> Corpus | Blend:
    """Find what is wrong with the files before the processes meet, and read them."""
    config = experiment.train.data
    file = None if config.tokenizer is None else experiment.file(config.tokenizer)
    tokenizer = load_tokenizer(file, config.end_token)
    if tokenizer.vocab_size > experiment.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but the model's vocab_size is"
            f" {experiment.model.vocab_size}; give the model's own tokenizer, or a model of that size"
        )
    _check_tokenizer_of_init(experiment, tokenizer)
    parallel, deterministic = experiment.train.parallel, experiment.train.run.deterministic
    if text is None and config.prepared:
        distributed.initialize(parallel, deterministic)
        return load_blend(experiment, tokenizer, out / "data_index")
    if text is None and config.text is not None:
        text = experiment.file(config.text)
    corpus = load_corpus(text, config.held_out_fraction, config.sequence_length, tokenizer)
    distributed.initialize(parallel, deterministic)
    return corpus


def _check_tokenizer_of_init(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """An imported model knows the tokens of the file that was imported with it."""
    if experiment.train.init is None:
        return
    own = experiment.file(experiment.train.init) / "tokenizer.json"
    if own.is_file() and digest_of(own.read_bytes()) != tokenizer.digest:
        raise ConfigError(
            f"data.tokenizer is {tokenizer.name}, but the model of `init` was imported with {own}; give it"
        )
