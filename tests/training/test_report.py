"""The command `report` on the log of a real run: two pipeline stages of two tensor-parallel ranks."""

import json

import pytest

from megatron_compress.config import CompressionConfig
from megatron_compress.training.report import ReportError, read
from tests.test_repo import ROOT
from tests.training.start import PACKAGE, python, run, torchrun

COMPRESS = ROOT / "configs/compress/quickstart.yaml"


@pytest.fixture
def out(write_files, train_values, model_values, text, tmp_path):
    config = write_files({**train_values, "arms": []}, model_values)
    files = ["--config", config, "--text", text, "--out", tmp_path / "out", "--compress", COMPRESS]
    done = run(torchrun(4, *PACKAGE, "train", *files, "--steps", 4))
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


def test_a_runs_traffic_and_error_by_step(out):
    steps = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    steps = [record for record in steps if "loss" in record]
    assert len(steps) == 4
    for record in steps:
        assert set(record["traffic"]) == {"pipeline forward", "tensor backward", "tensor forward"}
        assert record["wire_bytes"] == sum(item["wire_bytes"] for item in record["traffic"].values())
    # Eight windows of 32 tokens and 64 channels, in float32, of which each tensor-parallel rank sends all.
    sent = [record["traffic"]["pipeline forward"] for record in steps]
    assert [item["logical_bytes"] for item in sent] == [8 * 32 * 64 * 4] * 4
    bits = CompressionConfig.load(COMPRESS).rule("pipeline", "forward").compressor
    assert all(bits.settings.low_bits < item["bits_per_element"] < bits.settings.high_bits + 1.5 for item in sent)
    assert 0 < sent[0]["relative_error"] < 0.1

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    board = [event.value for event in events.Scalars("bits_per_element/pipeline_forward")]
    assert board == pytest.approx([item["bits_per_element"] for item in sent])
    assert events.Scalars("relative_error/pipeline_forward")[0].step == 1

    done = run(python(*PACKAGE, "report", out / "train.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "first rank of train sent in 4 steps" in done.stdout
    assert "pipeline forward" in done.stdout
    assert (out / "train.png").read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused(tmp_path):
    log = tmp_path / "log.jsonl"
    with pytest.raises(ReportError, match=r"no such file; give the \.jsonl file"):
        read(log)
    log.write_text("step 1\n")
    with pytest.raises(ReportError, match="no line is of a training step"):
        read(log)
    plain = {"step": 1, "loss": 5.0, "loss_hex": (5.0).hex(), "grad_norm": 1.0, "lr": 1e-3, "seconds": 1.0}
    log.write_text(json.dumps({**plain, "tokens_per_second": 9.0}) + "\n")
    with pytest.raises(ReportError, match="no traffic was counted; give the log of a run with --compress"):
        read(log)
