"""What one run reports while it trains: a JSON line a step, and a progress bar if someone is watching."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class StepRecord:
    """One training step. `loss` is nats per byte over the global batch, before the update; `seconds` is wall time."""

    step: int
    loss: float
    loss_hex: str
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class HeldOutRecord:
    """Mean loss, in nats per byte, over the held-out windows after `step` updates."""

    step: int
    held_out_loss: float
    held_out_loss_hex: str


class RunLog:
    """Writes the records of one run. Only the first rank writes; on the others it does nothing.

    Args:
        path: the JSON-lines file, replaced if it is there.
        title: the run's name beside the bar.
        steps: how many steps the bar has.
    """

    def __init__(self, path: Path, title: str, steps: int, active: bool):
        self._active = active
        if not active:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._bar = _progress_bar()
        self._task = self._bar.add_task(title, total=steps, note="")

    def __enter__(self) -> RunLog:
        if self._active:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            self._bar.stop()
            self._file.close()

    def write(self, record: StepRecord | HeldOutRecord) -> None:
        if not self._active:
            return
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()
        if isinstance(record, StepRecord):
            note = f"loss {record.loss:.3f}  {record.tokens_per_second:,.0f} tokens/s"
            self._bar.update(self._task, completed=record.step, note=note)


def _progress_bar() -> Progress:
    """On stderr; silent where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )
