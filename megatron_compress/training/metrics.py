"""What one run reports while it trains: a JSON line a step, and a progress bar if someone is watching."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_compress.training.step_traffic import DirectionTraffic


@dataclass(frozen=True)
class StepRecord:
    """One training step.

    Args:
        loss: nats per token over the global batch, before the update.
        seconds: wall time.
        wire_bytes: that the first rank sent on the compressed axes; None for plain Megatron, where nobody counts.
        traffic: the same by "AXIS DIRECTION". The first rank is in the first stage, which sends no gradients on.
    """

    step: int
    loss: float
    loss_hex: str
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_second: float
    wire_bytes: int | None = None
    traffic: dict[str, DirectionTraffic] | None = None

    def with_traffic(self, traffic: dict[str, DirectionTraffic]) -> StepRecord:
        return replace(self, traffic=traffic, wire_bytes=sum(item.wire_bytes for item in traffic.values()))


@dataclass(frozen=True)
class HeldOutRecord:
    """Mean loss, in nats per token, over the held-out windows after `step` updates."""

    step: int
    held_out_loss: float
    held_out_loss_hex: str


class RunLog:
    """Writes the records of one run. Only the first rank writes; on the others it does nothing.

    Args:
        path: the JSON-lines file, replaced if it is there; of a resumed run, what comes after step `done` is.
        title: the run's name beside the bar.
        steps: how many steps the bar has.
        done: steps of a resumed run before this one; `before` has their records.
        out: folder for TensorBoard; None: it gets nothing.
    """

    def __init__(self, path: Path, title: str, steps: int, active: bool, done: int = 0, out: Path | None = None):
        self._active = active
        self.before: list[StepRecord | HeldOutRecord] = []
        if not active:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if done and path.exists():
            self.before = [record for record in read_log(path) if record.step <= done]
        self._file = path.open("w")
        self._file.writelines(_line(record) for record in self.before)
        self._board = None if out is None else _board(out / "tensorboard", done)
        self._bar = _progress_bar()
        self._task = self._bar.add_task(title, total=steps, completed=done, note="")

    def __enter__(self) -> RunLog:
        if self._active:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            self._bar.stop()
            self._file.close()
            if self._board is not None:
                self._board.close()

    def write(self, record: StepRecord | HeldOutRecord) -> None:
        if not self._active:
            return
        self._file.write(_line(record))
        self._file.flush()
        values = _values(record)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, record.step)
        if isinstance(record, StepRecord):
            self._bar.update(self._task, completed=record.step, note=_note(values))


def _line(record: StepRecord | HeldOutRecord) -> str:
    return json.dumps(asdict(record)) + "\n"


def read_log(path: Path) -> list[StepRecord | HeldOutRecord]:
    """The records of a log; its last line may have been cut short when the run was killed."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, TypeError, AttributeError):
            break
    return records


def _record(values: dict) -> StepRecord | HeldOutRecord:
    if "held_out_loss" in values:
        return HeldOutRecord(**values)
    traffic = values.pop("traffic", None)
    by_name = None if traffic is None else {name: DirectionTraffic(**item) for name, item in traffic.items()}
    return StepRecord(**values, traffic=by_name)


def _values(record: StepRecord | HeldOutRecord) -> dict[str, float]:
    """What people look at."""
    if isinstance(record, HeldOutRecord):
        return {"held_out_loss": record.held_out_loss}
    names = ("loss", "grad_norm", "lr", "tokens_per_second")
    values = {name: getattr(record, name) for name in names}
    if record.wire_bytes is not None:
        values["wire_bytes_per_second"] = record.wire_bytes / record.seconds
    for name, item in (record.traffic or {}).items():
        for column in ("bits_per_element", "relative_error"):
            if (value := getattr(item, column)) is not None:
                values[f"{column}/{name.replace(' ', '_')}"] = value
    return values


def _note(values: dict[str, float]) -> str:
    note = f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s"
    sent = values.get("wire_bytes_per_second")
    return note if sent is None else f"{note}  {sent / 1e6:,.1f} wire MB/s"


def _board(folder: Path, done: int):
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    return SummaryWriter(str(folder), purge_step=done + 1)


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
