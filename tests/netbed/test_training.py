"""Two pipeline stages train over a slow link: what crosses it is what the hooks counted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("can_build")

ROOT = Path(__file__).parents[2]
RATE = 20e6
# TCP/IP headers and acknowledgements; and what the ranks say to each other apart from the pipeline's messages.
HEADERS, TALK = 1.08, 200_000


@pytest.mark.timeout(550)
def test_the_link_carries_what_the_hooks_counted(write_files, train_values, model_values, text, tmp_path):
    train_values["parallel"] = {"pipeline": 2}
    train_values["data"] |= {"sequence_length": 256, "micro_batch_size": 4, "global_batch_size": 32}
    train_values["run"] = {"steps": 2}
    train_values["optimizer"]["warmup_steps"] = 1
    train_values["arms"] = []
    config = write_files(train_values, {**model_values, "hidden_size": 128})
    pretrain = ["bash", ROOT / "scripts/pretrain.sh", "--config", config, "--text", text, "--out", tmp_path / "out"]
    bed = ["netbed", "--nodes", "2", "--rate", "20mbit", "--"]
    compress = ["--compress", ROOT / "configs/compress/quickstart.yaml"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the script takes python3 where there is no .venv
    done = subprocess.run(
        [sys.executable, "-m", "megatron_compress", *bed, *pretrain, *compress],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "PATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out/results.json").read_text())
    (arm,) = results["arms"]
    counted = {total["direction"]: total["wire_bytes"] for total in arm["report"]["totals"]}
    sent = {
        link: int(count.replace(",", "")) for link, count in re.findall(r"netbed: (.*): ([\d,]+) bytes", done.stderr)
    }
    assert counted["forward"] > 1e6 and counted["backward"] > 1e6  # 16 messages of 512 KB before compression
    for link, direction in (("node 0 to node 1", "forward"), ("node 1 to node 0", "backward")):
        assert counted[direction] < sent[link] < HEADERS * counted[direction] + TALK
    seconds = sum(step["seconds"] for step in arm["steps"])
    assert seconds > 8 * counted["backward"] / RATE
