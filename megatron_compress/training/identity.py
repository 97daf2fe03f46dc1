"""What makes two runs the same run, so that one can go on from the other's checkpoint."""

from __future__ import annotations

from typing import Protocol

from megatron_compress.training.config import Experiment
from megatron_compress.training.tokenizer import Tokenizer


class Data(Protocol):
    """Where microbatches come from: `data.Corpus` or `prepared.Blend`."""

    tokenizer: Tokenizer

    def describe(self) -> dict: ...


def identity(experiment: Experiment, data: Data) -> dict:
    """Plain values; what only says where and how fast a run computes is left out."""
    train = experiment.train
    return {
        "model": experiment.model.model_dump(),
        "tokenizer": data.tokenizer.digest,
        "data": {**train.data.model_dump(), "text": data.describe()},
        "optimizer": train.optimizer.model_dump(),
        "precision": train.run.precision,
        "steps": train.run.steps,
        "seed": train.run.seed,
    }


def differences(mine: dict, theirs: dict) -> tuple[list[str], list[str]]:
    """What forbids to go on from a checkpoint of `theirs`, and what only changes the course of training."""
    problems = [
        f"model.{key}: {theirs['model'].get(key)!r} there, {value!r} here"
        for key, value in mine["model"].items()
        if value != theirs["model"].get(key)
    ]
    if mine["tokenizer"] != theirs["tokenizer"]:
        problems.append("its tokenizer is another file than data.tokenizer")
    remarks = [
        f"{key} differs from the run that saved it: it was {theirs[key]}"
        for key, value in mine.items()
        if key not in ("model", "tokenizer") and value != theirs[key]
    ]
    return problems, remarks
