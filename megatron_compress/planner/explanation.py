"""`python -m megatron_compress explain`: how each kind of message would travel, decided as in a run (`Session`)."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_compress.collectives.message import Message
from megatron_compress.config import CompressionConfig
from megatron_compress.planner.commands import read_model
from megatron_compress.planner.messages import Layout, messages
from megatron_compress.session import Choice, Place, Session
from megatron_compress.strict_yaml import ConfigError

Row = tuple[Place, Message, int, Choice]


def run(config: Path, model: Path, **layout) -> None:
    """Print the rules, then a line for each kind of message of a stage and microbatch."""
    console = Console(highlight=False)
    try:
        compression = CompressionConfig.load(config)
        shape = Layout(read_model(model, layout["pipeline"] * layout["chunks"]), **layout)
    except ConfigError as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    for line in compression.describe():
        console.print(line, markup=False)
    console.print(_table(compression, shape))


def explain(compression: CompressionConfig, layout: Layout, stage: int) -> list[Row]:
    """Each kind of message that a rank of `stage` sends for a microbatch, how often, and how it travels.

    It is that of a step after every rule's `first_step`, and after the first epoch of compressors that remember.
    """
    session = Session(compression)
    session.step = max((rule.first_step for _, _, rule in compression.rules() if rule), default=0)
    counts = Counter(messages(layout, stage))
    return [(*kind, count, session.choose_by_rule(*kind)) for kind, count in counts.items()]


def _table(compression: CompressionConfig, layout: Layout) -> Table:
    table = Table(title="what one rank sends for a microbatch", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "message", "operation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "plain MB", "wire MB", "bits per\nelement"):
        table.add_column(heading, justify="right")
    table.add_column("how")
    stages = [explain(compression, layout, stage) for stage in range(layout.pipeline)]
    # Stages in the middle are alike, and take one section.
    for _, alike in itertools.groupby(range(layout.pipeline), lambda stage: [_cells(*row) for row in stages[stage]]):
        numbers = list(alike)
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        for row in stages[numbers[0]]:
            table.add_row(name, *_cells(*row))
        table.add_row(name, "all", "", *_total(stages[numbers[0]]), "", end_section=True)
    return table


def _cells(place: Place, message: Message, count: int, choice: Choice) -> tuple[str, ...]:
    how = f"plain: {choice.plain_reason}" if choice.compressor is None else choice.compressor.name
    numbers = _numbers(message.logical_bytes * count, choice.wire_bytes * count, message.spec.dtype.itemsize)
    return (f"{place.axis} {place.direction} {place.site}", message.operation, str(count), *numbers, how)


def _total(rows: list[Row]) -> tuple[str, ...]:
    count = sum(row[2] for row in rows)
    logical = sum(message.logical_bytes * count for _, message, count, _ in rows)
    wire = sum(choice.wire_bytes * count for _, _, count, choice in rows)
    itemsize = rows[0][1].spec.dtype.itemsize if rows else 1
    return (str(count), *_numbers(logical, wire, itemsize))


def _numbers(logical: int, wire: int, itemsize: int) -> tuple[str, str, str]:
    bits = f"{8 * wire * itemsize / logical:.3f}" if logical else "-"
    return f"{logical / 1e6:,.2f}", f"{wire / 1e6:,.2f}", bits
