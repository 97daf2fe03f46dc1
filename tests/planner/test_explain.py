"""`explain` says of each message what the runs of the hooks' matrix are shown to do with it."""

from collections import Counter

import pytest
from typer.testing import CliRunner

from megatron_compress.cli import app
from megatron_compress.config import CompressionConfig
from megatron_compress.planner.explanation import explain
from megatron_compress.planner.messages import Layout
from tests.hooks import matrix, runs
from tests.hooks.checks import IDENTITY, MIXED

LLAMA = ["--model", "configs/models/llama3_8b"]


def _layout(case: matrix.Case) -> Layout:
    return Layout(
        runs.experiment(case.tensor, case.pipeline, layers=case.layers * case.pipeline).model,
        tensor=case.tensor,
        pipeline=case.pipeline,
        chunks=case.chunks,
        sequences=runs.MICRO_BATCH,
        length=runs.SEQUENCE,
        sequence_parallel=case.sequence_parallel,
        recompute=case.recompute,
        fp32=True,
    )


@pytest.mark.parametrize("case", matrix.all_cases(), ids=str)
@pytest.mark.parametrize("compress", [IDENTITY, MIXED], ids=["identity", "mixed"])
def test_messages_and_bytes_are_those_that_runs_are_held_to(case, compress):
    config = CompressionConfig(**compress)
    for stage in range(case.pipeline):
        expected_count, expected_bytes = Counter(), Counter()
        for message in matrix.each_message(case, stage, runs.SEQUENCE, training=True):
            expected_count[message[:4]] += 1
            expected_bytes[message[:4]] += matrix.bytes_of(message, case.tensor, config)
        count, wire_bytes = Counter(), Counter()
        for place, message, times, choice in explain(config, _layout(case), stage):
            kind = (place.axis, place.direction, place.site, message.operation)
            count[kind] += times
            wire_bytes[kind] += times * choice.wire_bytes
        assert count == expected_count
        assert wire_bytes == expected_bytes


def _run(*arguments):
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "160"})


def test_the_table_has_what_is_sent_plainly_and_why():
    done = _run("explain", "configs/compress/mixed.yaml", *LLAMA, "--tp", "2", "--pp", "4", "--length", "4096")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert ["0", "tensor", "forward", "embedding", "all_reduce", "1"] in [row[:6] for row in rows]
    assert any(row[:5] == ["1", "to", "2", "pipeline", "forward"] and row[-1] == "tah_quant" for row in rows)
    assert any(row[:3] == ["3", "tensor", "backward"] and row[-3:] == ["plain:", "exempt", "site"] for row in rows)
    # 4096 tokens of 4096 bfloat16, 1 all-reduce of two ranks: the bytes of the tensor.
    assert any("33.55" in row and "all_reduce" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["configs/compress/mixed.yaml", *LLAMA, "--pp", "3"], "32 layers do not divide into 3 equal stages"),
        (["configs/compress/mixed.yaml", *LLAMA, "--sequence-parallel"], "needs at least two tensor-parallel ranks"),
        (["configs/compress/none.yaml", *LLAMA], "none.yaml"),
    ],
)
def test_errors(arguments, error):
    done = _run("explain", *arguments)
    assert done.exit_code == 2 and "error: " in done.output and error in " ".join(done.output.split())


def test_a_compressor_that_remembers_is_explained_as_after_its_first_epoch():
    config = CompressionConfig(pipeline={"forward": {"compressor": "aq_sgd", "bits": 4}})
    layout = _layout(matrix.Case("1f1b", False, False, tensor=1, pipeline=2))
    ((_, _, _, choice),) = explain(config, layout, 0)[:1]
    assert choice.compressor.name == "aq_sgd" and choice.plain_reason is None
