"""A resumed run repeats the uninterrupted one to the bit, in every layout, and after a kill at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.resume_layouts import LAYOUTS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def config(write_files, train_values, model_values):
    """Eight steps with dropout, a checkpoint after the fourth and the eighth."""
    train_values["run"] |= {"save_every": 4, "evaluate_every": 4}
    train_values["parallel"] = {"pipeline": 2}
    train_values["arms"] = []
    return write_files(train_values, {**model_values, "num_layers": 4, "dropout": 0.1})


@pytest.mark.timeout(900)
def test_every_layout_resumes_to_the_bit(config, text):
    script = str(Path(__file__).with_name("resume_layouts.py"))
    done = subprocess.run(
        [*TORCHRUN, script, str(config), str(text)], capture_output=True, text=True, timeout=850, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["layout"] for result in results] == list(LAYOUTS)
    for result in results:
        assert len(result["whole"]) == result["log"] == 10
        assert result["resumed"] == result["whole"], result["layout"]
    assert done.stderr.count("resumed from") == len(LAYOUTS)


def _start(config, text, out, *more):
    arguments = ["train", "--config", config, "--text", text, "--out", out, "--steps", 60, *more]
    return subprocess.Popen(
        [*TORCHRUN, "-m", "megatron_compress", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def _finish(process):
    out, err = process.communicate(timeout=400)
    return process.returncode, out + err


def _workers(process) -> list[int]:
    """The ranks, children of torchrun."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _wait_until(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _losses(out) -> dict:
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss_hex"] for line in lines if "loss_hex" in line}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nothing_is_lost_when_ranks_are_killed(config, text, tmp_path):
    """All are killed during a save, then one in the middle of a step; the third start ends as if nothing had been."""
    status, said = _finish(_start(config, text, tmp_path / "whole"))
    assert status == 0, said
    out = tmp_path / "killed"
    checkpoints = out / "checkpoints"

    process = _start(config, text, out)
    _wait_until(lambda: (checkpoints / "step_00000012.partial").exists(), process)
    os.killpg(process.pid, signal.SIGKILL)
    _finish(process)
    saved = (checkpoints / "latest").read_text().strip()
    assert saved in ("step_00000008", "step_00000012") and (checkpoints / saved).is_dir()

    process = _start(config, text, out, "--resume")
    _wait_until(lambda: max(_losses(out), default=0) > 22, process)
    started = time.monotonic()
    os.kill(_workers(process)[-1], signal.SIGKILL)
    status, said = _finish(process)
    assert status != 0 and "SIGKILL" in said
    assert time.monotonic() - started < 60

    status, said = _finish(_start(config, text, out, "--resume"))
    assert status == 0 and "resumed from" in said, said
    assert _losses(out) == _losses(tmp_path / "whole")
    assert not list(checkpoints.glob("*.partial"))
