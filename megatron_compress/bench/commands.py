"""What each bench command does: measure, print one table, write JSON with its provenance."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import track

from megatron_compress.bench import kernels as kernel_bench
from megatron_compress.ops import extension, library
from megatron_compress.training.provenance import provenance


def kernels(out: Path | None, megabytes: list[int], only: str) -> None:
    """`python -m megatron_compress bench kernels`."""
    console = Console(highlight=False, width=140)
    if not torch.cuda.is_available():
        console.print("bench kernels needs a CUDA device; there is none here")
        raise typer.Exit(2)
    library.ready()
    timings = list(track(kernel_bench.measure(megabytes, only), description="timing", console=Console(stderr=True)))
    console.print(kernel_bench.table(timings))
    console.print(f"CUDA kernels: {extension.status()}")
    if out is not None:
        result = {"provenance": provenance(), "kernels": extension.status(), "timings": kernel_bench.to_json(timings)}
        out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {out}")
