"""What the command line does with a plan: read, compute, print."""

from __future__ import annotations

from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_compress import strict_yaml
from megatron_compress.netbed import units
from megatron_compress.planner.measured import Kernel, device
from megatron_compress.planner.plan import Choice, Setting, evaluate, rank
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.model_config import ModelConfig


def run(model: Path, gpu: str, link: str, **layout: int) -> None:
    """`python -m megatron_compress plan`."""
    console = Console(highlight=False)
    try:
        setting = Setting(read_model(model, layout["pipeline"]), device(gpu), link=units.rate(link), **layout)
    except (ConfigError, ValueError) as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    plain, choices = evaluate(setting, None, None, None), rank(setting)
    console.print(_table(plain, choices[:5]))
    best = choices[0]
    console.print(f"best: pipeline forward {_name(best.forward)}, backward {_name(best.backward)}, ", end="")
    console.print(f"tensor {_name(best.reductions)}: {plain.seconds / best.seconds:.2f} times as fast as plain")
    console.print(f"speeds: {setting.device.provenance}")


def read_model(file: Path, stages: int) -> ModelConfig:
    """A model file, with or without .yaml, that `stages` equal stages can share.

    Raises:
        ConfigError: it is wrong, or does not divide.
    """
    path = file if file.suffix else file.with_suffix(".yaml")
    model = strict_yaml.load(path, ModelConfig)
    if model.num_layers % stages:
        raise ConfigError(f"{path}: {model.num_layers} layers do not divide into {stages} equal stages")
    return model


def _table(plain: Choice, choices: list[Choice]) -> Table:
    table = Table(title="step, plain and with the fastest compressors", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("pipeline forward", "pipeline backward", "tensor"):
        table.add_column(heading)
    for heading in ("step s", "wire share", "speed-up"):
        table.add_column(heading, justify="right")
    for choice in (plain, *choices):
        names = [_name(kernel) for kernel in (choice.forward, choice.backward, choice.reductions)]
        numbers = [f"{choice.seconds:.3g}", f"{choice.wire_share:.0%}", f"{plain.seconds / choice.seconds:.2f}"]
        table.add_row(*names, *numbers)
    return table


def _name(kernel: Kernel | None) -> str:
    if kernel is None:
        return "plain"
    return " ".join([kernel.compressor, *(f"{key}={value}" for key, value in kernel.settings.items())])
