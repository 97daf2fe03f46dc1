"""The planner's arithmetic, against cases computed by hand, and its data against the records they were taken from."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_compress import strict_yaml
from megatron_compress.bench.kernels import CASES
from megatron_compress.cli import app
from megatron_compress.planner import measured
from megatron_compress.planner.compute import head_flops, layer_flops, stage_flops
from megatron_compress.planner.measured import Kernel
from megatron_compress.planner.plan import Setting, evaluate, rank, reduction_seconds
from megatron_compress.planner.schedule import PAYLOAD_SHARE, message_seconds, step_seconds
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.model_config import ModelConfig

ROOT = Path(__file__).parents[2]


def model(name: str) -> ModelConfig:
    return strict_yaml.load(ROOT / f"configs/models/{name}.yaml", ModelConfig)


def setting(**changes) -> Setting:
    given = {"tensor": 1, "pipeline": 2, "sequences": 1, "length": 1024, "num_microbatches": 8, "link": 100e6}
    return Setting(model("gpt2_xl"), measured.device("h200"), **{**given, **changes})


def test_operations_of_gpt2_xl():
    """1024 tokens: 12 h² = 30.72 M weights a layer, 2 operations each, and 4 · 1024² · 1600 for attention."""
    assert layer_flops(model("gpt2_xl"), 1, 1024) == 2 * 1024 * 30_720_000 + 4 * 1024**2 * 1600
    assert head_flops(model("gpt2_xl"), 2, 10) == 2 * 20 * 1600 * 50257


def test_operations_of_grouped_queries_and_swiglu():
    """LLaMA-3 8B: q and projection 4096², k and v 4096 · 1024, three matrices of 4096 · 14336: 218.1 M a layer."""
    weights = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert layer_flops(model("llama3_8b"), 1, 1) == 2 * weights + 4 * 4096


def test_stages_share_layers_and_the_last_has_the_head():
    first, last = stage_flops(model("gpt2_xl"), 1, 8, tensor=2, pipeline=2)
    assert first == 3 * 24 * layer_flops(model("gpt2_xl"), 1, 8) / 2
    assert last - first == 3 * head_flops(model("gpt2_xl"), 1, 8) / 2


def test_a_message_takes_its_bytes_with_headers():
    assert message_seconds(1448, 1514 * 8) == pytest.approx(1.0)
    assert message_seconds(1448, 1514 * 4) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("stages", "forward", "backward", "microbatches", "overlap", "seconds"),
    [
        ([5.0], 0.0, 0.0, 4, True, 20),  # no pipeline
        ([3.0, 3.0], 0.0, 0.0, 4, True, 6 + 3 * 3),  # no links: fill, then a stage's work
        ([0.0, 0.0], 2.0, 3.0, 4, True, 5 + 3 * 3),  # no work: the slower direction
        ([0.0, 0.0], 2.0, 3.0, 4, False, 5 + 3 * 3),  # the same without overlap: exchanges go both ways at once
        ([1.0, 1.0], 2.0, 3.0, 4, True, 7 + 3 * 3.5),  # two microbatches in flight: (1 + 1 + 2 + 3) / 2
        ([1.0, 1.0], 2.0, 3.0, 4, False, 7 + 3 * 4),  # work, then exchange
        ([9.0, 1.0], 2.0, 3.0, 4, True, 15 + 3 * 9),  # one stage is slower than all else
        ([1.0, 1.0, 1.0], 2.0, 2.0, 5, True, 11 + 4 * 11 / 3),  # three in flight over two links
        ([1.0, 1.0, 1.0], 2.0, 2.0, 5, False, 11 + 4 * 5),  # the middle exchanges with both neighbours
    ],
)
def test_steps_by_hand(stages, forward, backward, microbatches, overlap, seconds):
    assert step_seconds(stages, forward, backward, microbatches, overlap) == pytest.approx(seconds)


def test_kernels_are_linear_between_what_was_measured():
    kernel = Kernel(compressor="fp8", encode=(10.0, 73.0), decode=(5.0, 5.0), sum_of_4=(8.0, 8.0))
    assert kernel.encode_seconds(2**20) == pytest.approx(10e-6)
    assert kernel.encode_seconds(2 * 2**20) == pytest.approx(11e-6)
    assert kernel.encode_seconds(64 * 2**20) == pytest.approx(73e-6)
    assert kernel.decode_seconds(2**20, payloads=2) == pytest.approx(6e-6)


def test_reductions_by_hand():
    """Of bfloat16 over two ranks: 40 µs, and all bytes at 304 GB/s; in fp8, 8.125 of 16 bits, encode and sum."""
    of_two = setting(tensor=2, length=5243)
    nbytes = of_two.activation.nbytes
    assert reduction_seconds(of_two, None) == pytest.approx(40e-6 + nbytes / 304e9)
    fp8 = next(kernel for kernel in of_two.device.kernels if kernel.compressor == "fp8")
    expected = 40e-6 + nbytes * 8.125 / 16 / 304e9 + fp8.encode_seconds(nbytes) + fp8.decode_seconds(nbytes, 2)
    assert reduction_seconds(of_two, fp8) == pytest.approx(expected, rel=1e-3)
    assert reduction_seconds(setting(), None) == 0


def test_plain_gpt2_xl_over_100_mbit_by_hand():
    """A message of 1024 · 1600 bfloat16 takes 274 ms, its arithmetic 12 ms at 475 TFLOP/s: p = 12.3 + 274."""
    choice = evaluate(setting(), None, None, None)
    stages = [flops / 475e12 for flops in stage_flops(model("gpt2_xl"), 1, 1024, 1, 2)]
    wire = 8 * 1024 * 1600 * 2 / (100e6 * PAYLOAD_SHARE)
    assert choice.seconds == pytest.approx(sum(stages) + 2 * wire + 7 * (max(stages) + wire))
    assert choice.free_seconds == pytest.approx(sum(stages) + 7 * max(stages))
    assert choice.wire_share == pytest.approx(1 - choice.free_seconds / choice.seconds)


def test_the_slower_the_link_the_fewer_bits_win():
    slow, fast = (rank(setting(link=link))[0] for link in (100e6, 34e12))
    assert slow.forward is not None and slow.backward is not None
    assert fast.forward is None and fast.backward is None
    times = [choice.seconds for choice in rank(setting())]
    assert times == sorted(times)


def test_the_data_are_those_of_the_record():
    timings = json.loads((ROOT / "docs/results/kernels/kernels.json").read_text())["timings"]
    recorded = {(t["kernel"], t["operation"], t["megabytes"]): t["microseconds"] for t in timings}
    kernels = measured.device("h200").kernels
    assert [(kernel.compressor, kernel.settings) for kernel in kernels] == list(CASES.values())
    for kernel, label in zip(kernels, CASES, strict=True):
        for values, operation in ((kernel.encode, "encode"), (kernel.decode, "decode"), (kernel.sum_of_4, "sum of 4")):
            assert values == pytest.approx([recorded[label, operation, size] for size in (1, 64)], abs=0.05)


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="nearest is 'h200'"):
        measured.device("h20")


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ([], 0, "best: pipeline forward fp4_quant group_size=128"),
        (["--pp", "7"], 2, "48 layers do not divide into 7 equal stages"),
        (["--gpu", "tpu"], 2, "nothing was measured"),
    ],
)
def test_the_command_prints_the_best_and_refuses_what_cannot_be(more, status, said):
    command = ["plan", "--model", str(ROOT / "configs/models/gpt2_xl"), "--link", "300mbit", *more]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == status
    assert said in result.stdout
