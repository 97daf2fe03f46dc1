"""The log of a compressed run for human eyes: a table of its traffic and error, and a picture of both by step."""

from __future__ import annotations

from pathlib import Path

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_compress.training.metrics import HeldOutRecord, StepRecord, read_log


class ReportError(ValueError):
    """A file from which no report can be made."""


def run(log: Path, picture: Path) -> None:
    """`python -m megatron_compress report`."""
    console = Console(highlight=False)
    try:
        records = read(log)
    except ReportError as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    steps = [record for record in records if isinstance(record, StepRecord)]
    console.print(table(log.stem, steps))
    console.print(f"step {steps[-1].step}: loss {steps[-1].loss:.4f}, {steps[-1].tokens_per_second:,.0f} tokens/s")
    draw(picture, records)
    console.print(f"wrote {picture}", markup=False)


def read(log: Path) -> list[StepRecord | HeldOutRecord]:
    """The records of a compressed run, at least one step among them.

    Raises:
        ReportError: there is no such file, or it is another one; with what to give instead.
    """
    if not log.is_file():
        raise ReportError(f"{log}: no such file; give the .jsonl file that a run wrote to its --out folder")
    records = read_log(log)
    steps = [record for record in records if isinstance(record, StepRecord)]
    if not steps:
        raise ReportError(f"{log}: no line is of a training step; give the .jsonl file of a run that has begun")
    if not any(record.traffic for record in steps):
        raise ReportError(f"{log}: no traffic was counted; give the log of a run with --compress")
    return records


def table(name: str, steps: list[StepRecord]) -> Table:
    """Of each axis and direction: bytes over all steps, bits per element in the last, and the sampled errors."""
    result = Table(title=f"what the first rank of {name} sent in {len(steps)} steps", box=box.SIMPLE_HEAD)
    result.add_column("message", no_wrap=True)
    for heading in ("logical\nMB", "wire\nMB", "ratio", "bits per\nelement", "error\nmean", "error\nlast"):
        result.add_column(heading, justify="right")
    for direction in directions(steps):
        logical, wire = (sum(column(steps, direction, key)[1]) for key in ("logical_bytes", "wire_bytes"))
        _, bits = column(steps, direction, "bits_per_element")
        _, errors = column(steps, direction, "relative_error")
        result.add_row(
            direction,
            f"{logical / 1e6:,.1f}",
            f"{wire / 1e6:,.1f}",
            f"{logical / wire:.2f}x" if wire else "-",
            f"{bits[-1]:.3f}" if bits else "-",
            f"{sum(errors) / len(errors):.1e}" if errors else "-",
            f"{errors[-1]:.1e}" if errors else "-",
        )
    return result


def directions(steps: list[StepRecord]) -> list[str]:
    """Each "AXIS DIRECTION" of any step, sorted."""
    return sorted({name for record in steps for name in record.traffic or {}})


def column(steps: list[StepRecord], direction: str, key: str) -> tuple[list[int], list[float]]:
    """The steps that have a value, and the values."""
    items = [(record.step, (record.traffic or {}).get(direction)) for record in steps]
    pairs = [(step, getattr(item, key)) for step, item in items if item and getattr(item, key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def draw(picture: Path, records: list[StepRecord | HeldOutRecord]) -> None:
    """Three panels over the same steps: loss, bytes on the wire (dotted: logical), relative error."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    held_out = [record for record in records if isinstance(record, HeldOutRecord)]
    figure = Figure(figsize=(8, 8), layout="constrained")
    loss, sent, error = figure.subplots(3, sharex=True)
    loss.plot([record.step for record in steps], [record.loss for record in steps], label="training")
    loss.plot(
        [record.step for record in held_out], [record.held_out_loss for record in held_out], "o", label="held out"
    )
    for direction in directions(steps):
        at, wire = column(steps, direction, "wire_bytes")
        (line,) = sent.plot(at, [value / 1e6 for value in wire], label=direction)
        at, logical = column(steps, direction, "logical_bytes")
        sent.plot(at, [value / 1e6 for value in logical], ":", color=line.get_color())
        error.plot(*column(steps, direction, "relative_error"), ".-", color=line.get_color(), label=direction)
    loss.set(ylabel="loss, nats", title=f"{steps[-1].step} steps")
    sent.set(ylabel="MB a step (dotted: logical)", yscale="log")
    error.set(ylabel="relative error, mean square", xlabel="step", yscale="log")
    for axes in (loss, sent, error):
        axes.grid(alpha=0.3)
        axes.legend()
    FigureCanvasAgg(figure).print_png(picture)
