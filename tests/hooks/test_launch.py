"""A script that knows nothing of compression trains with it, started by the launcher or with one import."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/hooks/user_script.py"
LAUNCH = ("-m", "megatron_compress.launch", "--compress")
IDENTITY = "tensor: {forward: {compressor: identity}, backward: {compressor: identity}}"
FP8 = "tensor: {forward: {compressor: fp8}, backward: {compressor: fp8}}"


@pytest.fixture
def start(tmp_path):
    def start(*arguments, environment=None):
        """Run under torchrun; what was printed, the exit status, and each rank's losses."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*torchrun, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        losses = [file.read_text() for file in sorted(tmp_path.glob("losses.*"))]
        return done.stdout, done.returncode, losses

    return start


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "compress.yaml"
        file.write_text(text)
        return file

    return write


def test_the_same_script_runs_plainly_and_with_hooks(start, write, tmp_path):
    out = tmp_path / "losses"
    printed, status, plain = start(SCRIPT, out)
    assert status == 0 and len(plain) == 2, printed
    assert "megatron_compress" not in printed

    printed, status, launched = start(*LAUNCH, write(IDENTITY), SCRIPT, out)
    assert status == 0, printed
    assert launched == plain
    assert printed.count("traffic of") == 1 and "traffic of all 2 ranks" in printed
    assert printed.count("compression installed on megatron-core") == 1

    environment = {"MEGATRON_COMPRESS_CONFIG": str(write(FP8))}
    printed, status, compressed = start(SCRIPT, out, "--auto", environment=environment)
    assert status == 0, printed
    assert compressed != plain and compressed[0] == compressed[1]
    # Two ranks; three steps of two layers with two reductions each.
    rows = re.findall(r"tensor (forward|backward) (?:mlp|attention) +(\d+)", printed)
    assert len(rows) == 4 and {count for _, count in rows} == {"12"}, printed


def test_auto_without_the_variable_changes_nothing(start, tmp_path):
    environment = {"MEGATRON_COMPRESS_CONFIG": ""}
    printed, status, losses = start(SCRIPT, tmp_path / "losses", "--auto", environment=environment)
    assert status == 0 and len(losses) == 2 and "traffic of" not in printed, printed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_an_exception_ends_reports_too(start, write, tmp_path, rank):
    printed, status, _ = start(*LAUNCH, write(FP8), SCRIPT, tmp_path / "losses", "--fail-rank", rank)
    assert status != 0
    assert "ValueError: the script's own trouble" in printed
    assert f"traffic of rank {rank}, which an exception ended" in printed


@pytest.mark.parametrize(
    ("config", "script", "error"),
    [
        (FP8, "nowhere.py", "there is no script nowhere.py"),
        ("tensor: {forward: {compressor: fp9}}", SCRIPT, "fp8"),
    ],
)
def test_what_cannot_start_says_why(write, tmp_path, config, script, error):
    command = [sys.executable, *LAUNCH, write(config), script, tmp_path / "losses"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: " in done.stderr and error in done.stderr


def test_a_script_that_sends_nothing_is_told_so(tmp_path, write):
    script = tmp_path / "idle.py"
    script.write_text("import sys; import megatron_compress.auto; print(sys.argv[1:], __name__)")
    environment = {**os.environ, "MEGATRON_COMPRESS_CONFIG": str(write(FP8))}
    command = [sys.executable, *LAUNCH, write(FP8), script, "--compress", "x", "-h"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "['--compress', 'x', '-h'] __main__" in done.stdout
    # Launched, and with the import too: one report, one log.
    assert done.stdout.count("this rank: no message reached the hooks, so nothing was compressed") == 1
    assert done.stderr.count("compression installed on megatron-core") == 1
