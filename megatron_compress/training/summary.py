"""A comparison for human eyes: two tables, one line for each bit-for-bit check, and a picture of the losses."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_compress.training.compare import Arm, Equality

_TRAFFIC = [("pipeline", "forward"), ("pipeline", "backward"), ("tensor", "forward"), ("tensor", "backward")]
_SMOOTH = 0.9  # weight of the past in the moving average of the drawn training loss


def print_summary(arms: list[Arm], equal: list[Equality], out: Path, unit: str) -> None:
    """Print to stdout. Losses are in nats per `unit`."""
    console = Console()
    console.print(_loss_table(arms, unit))
    if any(arm.result.report is not None for arm in arms):
        console.print(_traffic_table(arms))
    for arm in arms:
        if arm.result.report is not None and arm.config.equals is None:  # a control has nothing to add
            console.print(arm.result.report.table(arm.name))
    for item in equal:
        console.print(str(item), style="green" if item.first_difference is None else "bold red")
    console.print(f"wrote {out / 'results.json'} and {out / 'curves.png'}", highlight=False)


def _loss_table(arms: list[Arm], unit: str) -> Table:
    table = Table(title=f"loss, nats per {unit}", box=box.SIMPLE_HEAD)
    for name in ("arm", "steps", "training", "held-out", f"vs {arms[0].name}", "tokens/s", "seconds"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm in arms:
        table.add_row(
            arm.name,
            str(len(arm.result.steps)),
            f"{arm.train_loss:.4f}",
            f"{arm.held_out_loss:.4f}",
            _difference(arm, arms[0]),
            f"{arm.tokens_per_second:,.0f}",
            f"{arm.seconds:.0f}",
        )
    return table


def _difference(arm: Arm, plain: Arm) -> str:
    """Of the held-out losses, where both arms have trained equally long."""
    if arm is plain or len(arm.result.steps) != len(plain.result.steps):
        return "-"
    return f"{arm.held_out_loss - plain.held_out_loss:+.4f}"


def _traffic_table(arms: list[Arm]) -> Table:
    table = Table(
        title="bits per element on the wire, and bytes that all ranks sent",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("arm", no_wrap=True)
    for axis, direction in _TRAFFIC:
        table.add_column(f"{axis}\n{direction}", justify="right", no_wrap=True)
    for name in ("wire\nMB", "logical\nMB", "ratio"):
        table.add_column(name, justify="right")
    for arm in arms:
        if arm.result.report is not None:
            table.add_row(arm.name, *_traffic_row(arm.result.report.totals()))
    return table


def _traffic_row(totals: list[dict]) -> list[str]:
    bits = {(total["axis"], total["direction"]): total["bits_per_element"] for total in totals}
    wire, logical = (sum(total[key] for total in totals) for key in ("wire_bytes", "logical_bytes"))
    cells = [f"{bits[key]:.2f}" if key in bits else "-" for key in _TRAFFIC]
    return [*cells, f"{wire / 1e6:,.0f}", f"{logical / 1e6:,.0f}", f"{logical / wire:.2f}x" if wire else "-"]


def draw_curves(path: Path, arms: list[Arm], unit: str) -> None:
    """Training loss (moving average) and held-out loss (marks) of every arm by step."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for arm in arms:
        steps = [record.step for record in arm.result.steps]
        (line,) = axes.plot(steps, _smoothed([record.loss for record in arm.result.steps]), label=arm.name)
        held_out = [(record.step, record.held_out_loss) for record in arm.result.held_out]
        axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="step", ylabel=f"loss, nats per {unit}", title="training loss (lines), held-out loss (dots)")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


def _smoothed(losses: list[float]) -> list[float]:
    smooth = losses[:1]
    for loss in losses[1:]:
        smooth.append(_SMOOTH * smooth[-1] + (1 - _SMOOTH) * loss)
    return smooth
