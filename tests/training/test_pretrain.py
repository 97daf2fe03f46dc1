"""scripts/pretrain.sh as a cluster starts it: once on each node, here two on one machine, over gloo."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_repo import ROOT
from tests.training.start import ENVIRONMENT

PRETRAIN = ["bash", str(ROOT / "scripts/pretrain.sh")]


def _free_port() -> int:
    """The port and the one after it, for a second start, are free just now."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _environment(**more: str) -> dict[str, str]:
    """One process a node, of this interpreter where the checkout has no .venv."""
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    return {**ENVIRONMENT, "PATH": path, "PYTHONPATH": str(ROOT), "NPROC": "1", **more}


def _start_nodes(arguments: list, **more: str) -> list[subprocess.Popen]:
    """As srun does in scripts/pretrain_slurm.sbatch: the same command and variables, but for SLURM_NODEID."""
    shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **more}
    return [
        subprocess.Popen(
            [*PRETRAIN, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(**shared, SLURM_NODEID=str(node)),
        )
        for node in (1, 0)
    ]


def _finish(nodes: list[subprocess.Popen]) -> list[str]:
    said = [node.communicate(timeout=250)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    return said


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def arguments(saving_config, text, tmp_path):
    return ["--config", saving_config, "--text", text, "--out", tmp_path / "out"]


def test_two_nodes_train_one_model(arguments, tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("export MASTER_ADDR=localhost\necho read the settings of the site\n")
    early, first = _finish(_start_nodes(arguments, SITE=str(site), MASTER_ADDR="nowhere.invalid"))
    assert "read the settings of the site" in early and "read the settings of the site" in first
    assert re.search(r"8 steps in \d+ s", first) and "steps in" not in early


@pytest.mark.slow
def test_a_killed_rank_is_started_again_on_both_nodes(arguments, tmp_path):
    nodes = _start_nodes([*arguments, "--steps", 60], RETRIES="1")
    latest = tmp_path / "out/checkpoints/latest"
    while not latest.exists():
        assert nodes[0].poll() is None, _finish(nodes)
        time.sleep(0.01)
    (torchrun,) = _children(nodes[0].pid)
    os.kill(_children(torchrun)[-1], signal.SIGKILL)
    for said in _finish(nodes):
        assert said.count("pretrain.sh: start 1 failed; the next one goes on from the newest checkpoint") == 1
    assert len((tmp_path / "out/train.jsonl").read_text().splitlines()) >= 60


@pytest.mark.parametrize(
    ("given", "reason"),
    [({}, "NODE_RANK is the number of this node"), ({"NODE_RANK": "0"}, "MASTER_ADDR: is the address of node 0")],
)
def test_what_a_node_must_be_told_is_asked_for(arguments, given, reason):
    absent = ("NODE_RANK", "SLURM_NODEID", "MASTER_ADDR")
    environment = {key: value for key, value in _environment(NNODES="2").items() if key not in absent}
    command = [*PRETRAIN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **given})
    assert done.returncode != 0
    assert reason in done.stderr
