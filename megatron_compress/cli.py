"""The command line, `python -m megatron_compress`. Commands that train run under torchrun, once a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_compress import cpu

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench", help="Measure this machine: times beside their floors.")

ConfigFile = Annotated[Path, typer.Option("--config", help="Training file, as in configs/train/.")]
Text = Annotated[Path | None, typer.Option(help="File or folder to train on; default: Python's standard library.")]
Out = Annotated[Path, typer.Option(help="Folder for logs and results.")]
Compress = Annotated[Path | None, typer.Option(help="Compression config file; default: plain Megatron.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Replaces run.steps of the training file.")]


@app.command()
def train(config: ConfigFile, out: Out, compress: Compress = None, text: Text = None, steps: Steps = None) -> None:
    """Train one model."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(lambda: commands.train(config, out, compress, text, steps))


@app.command()
def compare(config: ConfigFile, out: Out, text: Text = None) -> None:
    """Train every arm of the training file from the same seed and compare them."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(lambda: commands.compare(config, out, text))


@bench.command("kernels")
def bench_kernels(
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    sizes: Annotated[str, typer.Option(help="Megabytes of bfloat16, separated by commas.")] = "1,16,64,256",
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
) -> None:
    """Time every CUDA kernel against the memory it must move."""
    from megatron_compress.bench import commands

    commands.kernels(out, [int(size) for size in sizes.split(",")], only)
