"""Ranks that are killed and disks that are full lose no checkpoint, and the job ends soon and says why."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.training.start import ENVIRONMENT, PACKAGE, torchrun

STEPS = 60


def _start(config, text, out, *more):
    files = ["--config", config, "--text", text, "--out", out]
    return subprocess.Popen(
        torchrun(2, *PACKAGE, "train", *files, "--steps", STEPS, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )


def _finish(process):
    said, _ = process.communicate(timeout=400)
    return process.returncode, said


def _ranks(process) -> list[int]:
    """Process ids, children of torchrun."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _wait_until(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def _losses(out) -> dict:
    """Of the log as it stands; its last line may be half written."""
    log = out / "train.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss_hex"] for record in records if "loss_hex" in record}


def _kill_all_in_a_save(process, checkpoints: Path, file: str) -> str:
    """SIGKILL torchrun and all ranks when a checkpoint, not the first, has got as far as `file`; its name.

    They are stopped first, to see that the save is not over; else it is tried again at the next one.
    """
    _wait_until((checkpoints / "latest").exists, process)
    while True:
        _wait_until(lambda: _partial(checkpoints, file), process)
        pids = [*_ranks(process), process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        partial = _partial(checkpoints, file)
        for pid in pids:
            os.kill(pid, signal.SIGKILL if partial else signal.SIGCONT)
        if partial:
            _finish(process)
            return partial.name.removesuffix(".partial")


def _partial(checkpoints: Path, file: str) -> Path | None:
    return next((path for path in checkpoints.glob("step_*.partial") if (path / file).exists()), None)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nothing_is_lost_when_ranks_are_killed(saving_config, text, tmp_path):
    """All in three stages of a save, then one in the middle of a step; the last start ends as if nothing had been."""
    status, said = _finish(_start(saving_config, text, tmp_path / "whole"))
    assert status == 0, said
    out = tmp_path / "killed"
    checkpoints = out / "checkpoints"

    for file in (".", "__0_0.distcp", "manifest.json"):
        process = _start(saving_config, text, out, "--resume")
        lost = _kill_all_in_a_save(process, checkpoints, file)
        saved = (checkpoints / "latest").read_text().strip()
        assert saved < lost and (checkpoints / saved).is_dir()

    process = _start(saving_config, text, out, "--resume")
    logged = max(_losses(out))
    _wait_until(lambda: max(_losses(out), default=0) > logged, process)
    started = time.monotonic()
    os.kill(_ranks(process)[-1], signal.SIGKILL)
    status, said = _finish(process)
    assert status != 0 and "SIGKILL" in said
    assert time.monotonic() - started < 60

    status, said = _finish(_start(saving_config, text, out, "--resume"))
    assert status == 0 and "resumed from" in said, said
    assert _losses(out) == _losses(tmp_path / "whole") and len(_losses(out)) == STEPS
    assert not list(checkpoints.glob("*.partial"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one checkpoint and a half; a function that makes it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True).returncode

    if mount("size=4m"):
        pytest.skip("only root can mount a small file system")
    yield disk, lambda: mount("remount,size=64m")
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_ends_the_job_and_loses_nothing(saving_config, text, small_disk, tmp_path):
    disk, enlarge = small_disk
    status, said = _finish(_start(saving_config, text, disk / "out"))
    assert status == 1
    assert "step_00000008 could not be written" in said and "No space left on device" in said, said
    assert "step_00000004 is as it was; see to it and resume" in said, said
    assert sorted(path.name for path in (disk / "out/checkpoints").iterdir()) == ["latest", "step_00000004"]

    assert enlarge() == 0
    status, said = _finish(_start(saving_config, text, disk / "out", "--resume"))
    assert status == 0 and "resumed from" in said, said
    assert _finish(_start(saving_config, text, tmp_path / "whole"))[0] == 0
    assert _losses(disk / "out") == _losses(tmp_path / "whole")
