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
Text = Annotated[Path | None, typer.Option(help="File or folder of text; default: what the training file names.")]
Out = Annotated[Path, typer.Option(help="Folder for logs, checkpoints and results.")]
Compress = Annotated[Path | None, typer.Option(help="Compression config file; default: plain Megatron.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Replaces run.steps of the training file.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUT, if there is one.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Repeat every result to the bit, on GPUs too.")]
TokenizerFile = Annotated[Path | None, typer.Option(help="A file of the `tokenizers` library; default: bytes.")]
EndToken = Annotated[str | None, typer.Option(help="Token that ends a document; default: the usual names.")]


@app.command()
def train(
    config: ConfigFile,
    out: Out,
    compress: Compress = None,
    text: Text = None,
    steps: Steps = None,
    resume: Resume = False,
    deterministic: Deterministic = False,
) -> None:
    """Train one model."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(
        lambda: commands.train(commands.read(config, steps, deterministic), out, compress, text, resume)
    )


@app.command()
def compare(
    config: ConfigFile, out: Out, text: Text = None, steps: Steps = None, deterministic: Deterministic = False
) -> None:
    """Train every arm of the training file from the same seed and compare them."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(lambda: commands.compare(commands.read(config, steps, deterministic), out, text))


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Writes OUT.bin, OUT.idx and OUT.json.")],
    text: Annotated[Path | None, typer.Option(help="Text, .jsonl, or a folder; default: the standard library.")] = None,
    tokenizer: TokenizerFile = None,
    end_token: EndToken = None,
) -> None:
    """Turn text into a data set in Megatron's .bin/.idx format. Runs in one process."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(lambda: commands.prepare_text(text, out, tokenizer, end_token))


Source = Annotated[Path, typer.Option(help="A .gguf file, or a folder with config.json and .safetensors files.")]


@app.command("import-model")
def import_model(
    source: Source,
    out: Annotated[Path, typer.Option(help="Folder for model.yaml, tokenizer.json and the checkpoint.")],
    tensor: Annotated[int, typer.Option(min=1, help="Add zero heads until so many ranks can share them.")] = 1,
) -> None:
    """Turn a published model into a checkpoint to start from (`init`). Runs in one process."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(lambda: commands.import_model(source, out, tensor))


@app.command("check-model")
def check_model(config: ConfigFile, source: Source, out: Out, text: Text = None) -> None:
    """Compare the training file's `init`, in its layout of ranks, with the model that it was imported from."""
    cpu.apply()
    from megatron_compress.training import commands, distributed

    distributed.run_and_exit(lambda: commands.check_model(commands.read(config), source, out, text))


@app.command()
def netbed(
    command: Annotated[list[str], typer.Argument(help="A torchrun script, as scripts/pretrain.sh, after `--`.")],
    nodes: Annotated[int, typer.Option(help="How many, in a chain.")],
    rate: Annotated[str, typer.Option(help="Of every link in each direction: 100mbit, say.")],
    delay: Annotated[str | None, typer.Option(help="Of every link in each direction: 10ms, say.")] = None,
) -> None:
    """Run COMMAND on several nodes of a slow network, which are network namespaces of this machine. Needs root.

    Each is told NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, its network interface and its share of the GPUs.
    """
    from megatron_compress.netbed import commands

    commands.run(nodes, rate, delay, command)


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Model file, as in configs/models/.")],
    link: Annotated[str, typer.Option(help="Rate between pipeline stages, in each direction: 300mbit, say.")],
    gpu: Annotated[str, typer.Option(help="What computes: a name in planner/measured.yaml.")] = "h200",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, within a machine.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of a microbatch.")] = 1,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
) -> None:
    """Predict the time of a step, and which compressors shorten it most."""
    from megatron_compress.planner import commands

    shape = {"sequences": micro_batch, "length": length, "num_microbatches": microbatches}
    commands.run(model, gpu, link, tensor=tp, pipeline=pp, **shape)


@app.command()
def explain(
    config: Annotated[Path, typer.Argument(help="Compression config file.")],
    model: Annotated[Path, typer.Option(help="Model file, as in configs/models/.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    chunks: Annotated[int, typer.Option(min=1, help="Model chunks of a stage (interleaved schedule).")] = 1,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of a microbatch.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="As Megatron's.")] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Full recompute of every layer.")] = False,
    fp32: Annotated[bool, typer.Option("--fp32", help="Activations are float32, not bfloat16.")] = False,
) -> None:
    """Show how each kind of message of a training step would travel under CONFIG, before a job is started."""
    from megatron_compress.planner import explanation

    sizes = {"tensor": tp, "pipeline": pp, "chunks": chunks, "sequences": micro_batch, "length": length}
    explanation.run(config, model, sequence_parallel=sequence_parallel, recompute=recompute, fp32=fp32, **sizes)


@app.command()
def info() -> None:
    """Show what of this machine and its packages compression would use, and why not the rest."""
    cpu.apply()
    from megatron_compress import info

    info.run()


@app.command()
def report(
    log: Annotated[Path, typer.Argument(help="The .jsonl file that a run writes to its --out.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write; default: beside LOG, as .png.")] = None,
) -> None:
    """Show a compressed run's loss, traffic and error by step, as a table and a picture; of a running one too."""
    from megatron_compress.training import report

    report.run(log, out or log.with_suffix(".png"))


@bench.command("kernels")
def bench_kernels(
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    sizes: Annotated[str, typer.Option(help="Megabytes of bfloat16, separated by commas.")] = "1,16,64,256",
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
) -> None:
    """Time every CUDA kernel against the memory it must move."""
    from megatron_compress.bench import commands

    commands.kernels(out, [int(size) for size in sizes.split(",")], only)
