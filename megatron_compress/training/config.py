"""Typed YAML of the trainer: how a model (`model_config.py`) is trained, as in `configs/train/`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from megatron_compress import strict_yaml
from megatron_compress.strict_model import StrictModel
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.model_config import ModelConfig


class ParallelConfig(StrictModel):
    """The layout of ranks. What is left of the world size is data parallel."""

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    virtual_pipeline: int | None = Field(default=None, ge=2, description="model chunks per stage (interleaved 1F1B)")
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @model_validator(mode="after")
    def _supported(self) -> ParallelConfig:
        if self.virtual_pipeline and self.pipeline == 1:
            raise ValueError("virtual_pipeline needs pipeline >= 2")
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor >= 2")
        return self


class SourceConfig(StrictModel):
    """A data set in Megatron's format, as the command `prepare` writes it."""

    path: str = Field(description="of the files PATH.bin and PATH.idx")
    weight: float | None = Field(default=None, gt=0, description="share of the blend; for all sources or for none")


class DataConfig(StrictModel):
    """Windows of `sequence_length` tokens, `global_batch_size` of them a step.

    The tokens come from `prepared`, else from `text`, else from Python's standard library.
    """

    sequence_length: int = Field(ge=2)
    micro_batch_size: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)
    epoch_windows: int | None = Field(
        default=None, ge=1, description="train on so many windows, the same in every epoch; None: never the same again"
    )
    held_out_fraction: float = Field(default=0.05, gt=0, lt=0.5, description="share of the text never trained on")
    held_out_windows: int = Field(ge=1, description="fixed windows of held-out text; their mean loss is reported")
    tokenizer: str | None = Field(default=None, description="a file of the `tokenizers` library; None: bytes")
    end_token: str | None = Field(default=None, description="token that ends a document; None: the usual names")
    text: str | None = Field(default=None, description="file, .jsonl file, or folder of these")
    prepared: list[SourceConfig] = Field(default=[], description="a blend of prepared data sets")

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.text is not None and self.prepared:
            raise ValueError("both `text` and `prepared` are given; keep one of the two")
        if self.epoch_windows and self.epoch_windows % self.global_batch_size:
            raise ValueError(
                f"epoch_windows {self.epoch_windows} is not a multiple of global_batch_size {self.global_batch_size}"
            )
        if len({source.weight is None for source in self.prepared}) > 1:
            raise ValueError("some sources in `prepared` have a weight; give one to all, or to none (by size)")
        return self


class OptimizerConfig(StrictModel):
    """AdamW with linear warm-up, then decay to `min_lr` at the last step."""

    lr: float = Field(gt=0)
    min_lr: float = Field(ge=0)
    warmup_steps: int = Field(ge=0)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    clip_grad: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0: no clipping")


class RunConfig(StrictModel):
    steps: int = Field(ge=1, description="of the learning-rate schedule; and of the run, unless an arm has fewer")
    seed: int = Field(default=1234, ge=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: bool = False
    deterministic: bool = Field(default=False, description="on GPUs, only kernels that repeat their results to the bit")
    evaluate_every: int | None = Field(default=None, ge=1, description="steps between held-out losses; None: at end")
    save_every: int | None = Field(default=None, ge=1, description="steps between checkpoints; None: none are written")
    keep_checkpoints: int = Field(default=2, ge=1, description="the newest so many stay")


class ArmConfig(StrictModel):
    """One run of a comparison; all arms share everything else."""

    name: str
    compress: str | None = Field(default=None, description="compression config file; None: plain Megatron")
    steps: int | None = Field(default=None, ge=1, description="stop early; the schedule stays that of run.steps")
    equals: str | None = Field(default=None, description="an earlier arm whose losses this one must repeat to the bit")


class TrainConfig(StrictModel):
    """A training file. Paths in it are relative to the file."""

    model: str
    init: str | None = Field(default=None, description="checkpoint folder of the first weights; None: random weights")
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    optimizer: OptimizerConfig
    run: RunConfig
    arms: list[ArmConfig] = Field(default=[])

    @model_validator(mode="after")
    def _warmup_ends(self) -> TrainConfig:
        warmup_steps = self.optimizer.warmup_steps
        if warmup_steps >= self.run.steps:
            raise ValueError(f"run.steps is {self.run.steps}, but optimizer.warmup_steps alone is {warmup_steps}")
        return self

    @model_validator(mode="after")
    def _arms_are_comparable(self) -> TrainConfig:
        seen: list[str] = []
        for arm in self.arms:
            if arm.name in seen:
                raise ValueError(f"two arms are named {arm.name!r}")
            if arm.equals is not None and arm.equals not in seen:
                raise ValueError(f"arm {arm.name!r} equals {arm.equals!r}, which is no earlier arm")
            if arm.steps is not None and arm.steps > self.run.steps:
                raise ValueError(f"arm {arm.name!r} has {arm.steps} steps, but the schedule ends at {self.run.steps}")
            seen.append(arm.name)
        if self.arms and self.arms[0].compress is not None:
            raise ValueError("the first arm is what the others are compared with, so it has no `compress`")
        return self


@dataclass(frozen=True)
class Experiment:
    """A training file with its model file."""

    train: TrainConfig
    model: ModelConfig
    folder: Path

    def compress_file(self, arm: ArmConfig) -> Path | None:
        return None if arm.compress is None else self.file(arm.compress)

    def file(self, path: str) -> Path:
        """A path that the training file names."""
        return self.folder / path

    def with_steps(self, steps: int) -> Experiment:
        """The same experiment with its schedule, warm-up included, stretched or shrunk to another length."""
        warmup_steps = self.train.optimizer.warmup_steps * steps // self.train.run.steps
        optimizer = self.train.optimizer.model_copy(update={"warmup_steps": warmup_steps})
        run = self.train.run.model_copy(update={"steps": steps})
        train = self.train.model_copy(update={"optimizer": optimizer, "run": run})
        return replace(self, train=train)

    def deterministic(self) -> Experiment:
        """The same experiment with `run.deterministic` set."""
        run = self.train.run.model_copy(update={"deterministic": True})
        return replace(self, train=self.train.model_copy(update={"run": run}))


def load_experiment(path: Path) -> Experiment:
    """Read a training file and the model file that it names.

    Raises:
        ConfigError: a file is missing or wrong, or the two do not fit together.
    """
    train = strict_yaml.load(path, TrainConfig)
    model = strict_yaml.load(path.parent / train.model, ModelConfig)
    _check_layout(path, train, model)
    return Experiment(train, model, path.parent)


def _check_layout(path: Path, train: TrainConfig, model: ModelConfig) -> None:
    """What neither file can know alone."""
    parallel = train.parallel
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    query_groups = model.num_query_groups or model.num_attention_heads
    multiples = [
        ("num_layers", model.num_layers, "pipeline stages x virtual_pipeline", chunks),
        ("num_attention_heads", model.num_attention_heads, "parallel.tensor", parallel.tensor),
        ("num_query_groups", query_groups, "parallel.tensor", parallel.tensor),
        ("ffn_hidden_size", model.ffn_hidden_size, "parallel.tensor", parallel.tensor),
    ]
    if parallel.sequence_parallel:
        multiples.append(("sequence_length", train.data.sequence_length, "parallel.tensor", parallel.tensor))
    for name, value, of, divisor in multiples:
        if value % divisor:
            raise ConfigError(f"{path}: {name} is {value}, which is not a multiple of {of} = {divisor}")


def num_microbatches(train: TrainConfig, data_parallel_size: int) -> int:
    """Microbatches that each data-parallel rank runs in a step.

    Raises:
        ConfigError: the batch does not divide.
    """
    data = train.data
    unit = data.micro_batch_size * data_parallel_size
    for name, value in (("global_batch_size", data.global_batch_size), ("held_out_windows", data.held_out_windows)):
        if value % unit:
            raise ConfigError(
                f"data.{name} is {value}, which is not a multiple of micro_batch_size x data-parallel ranks"
                f" = {data.micro_batch_size} x {data_parallel_size}"
            )
    count = data.global_batch_size // unit
    if train.parallel.virtual_pipeline and count % train.parallel.pipeline:
        raise ConfigError(
            f"with virtual_pipeline the {count} microbatches of a step must be a multiple of pipeline"
            f" = {train.parallel.pipeline}; change data.global_batch_size"
        )
    return count
