"""Ranks that differ, never start, stop or die are named, in time, and leave nobody waiting."""

import inspect
import os
import signal
import time
from pathlib import Path

import pytest

import megatron_compress
from megatron_compress import peers
from megatron_compress.peers import Watch
from tests.distributed.pool import WorkerPool
from tests.hooks import runs


@pytest.fixture
def pool():
    """Three processes of their own: these tests break them."""
    pool = WorkerPool(3)
    yield pool
    pool.close()


def _default_timeout() -> float:
    return inspect.signature(megatron_compress.install).parameters["peer_timeout"].default


def test_the_default_timeout_leaves_time_to_tell_within_a_minute():
    assert _default_timeout() + 2 * peers._BEAT_SECONDS + 5 <= 60


def _start(group, digests, versions, packages, silent):
    if group.rank() == silent:
        return "silent"
    megatron_compress.__version__ = packages[group.rank()]
    watch = Watch(digests[group.rank()], versions[group.rank()], timeout=2.0)
    try:
        watch.start()
    except peers.PeerError as error:
        return str(error)
    finally:
        watch.stop()
    return "started"


def _outcomes(pool, digests="aaa", versions="111", packages="777", silent=None):
    began = time.monotonic()
    outcomes = pool.run(_start, digests, versions, packages, silent, world_size=3)
    assert time.monotonic() - began < 20
    return outcomes


def test_equal_ranks_start_again_and_again(pool):
    assert _outcomes(pool) == ["started"] * 3
    assert _outcomes(pool) == ["started"] * 3


def test_another_configuration_is_named_on_every_rank(pool):
    for outcome in _outcomes(pool, digests="aab"):
        assert "rank 2 (host" in outcome and "has configuration b, rank 0 has a" in outcome


def test_another_version_is_named_on_every_rank(pool):
    for outcome in _outcomes(pool, versions="121"):
        assert "rank 1 (host" in outcome and "has Megatron 2, rank 0 has 1" in outcome


def test_another_package_is_named_on_every_rank(pool):
    for outcome in _outcomes(pool, packages="778"):
        assert "rank 2 (host" in outcome and "has megatron_compress 8, rank 0 has 7" in outcome


@pytest.mark.parametrize(
    ("without", "peer_timeout"),
    [(0, 4.0), (1, 4.0), pytest.param(1, None, marks=pytest.mark.slow)],
    ids=["first rank", "another", "default timeout"],
)
def test_a_script_that_installs_on_all_ranks_but_one_ends(pool, without, peer_timeout, tmp_path):
    began, log = time.monotonic(), tmp_path / "error"
    seconds = _default_timeout() if peer_timeout is None else peer_timeout
    pool.start(runs.train_with_hooks_but_on_one, str(log), without, seconds, world_size=3)
    errors = [Path(f"{log}.{rank}") for rank in range(3)]
    _wait_until(lambda: all(error.exists() and error.read_text() for error in errors), 60)
    for rank in {0, 1, 2} - {without}:
        assert errors[rank].read_text().startswith(f"PeerError: rank {without} did not start compression")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_without_hooks_is_named(pool, silent):
    outcomes = _outcomes(pool, silent=silent)
    assert outcomes.pop(silent) == "silent"
    for outcome in outcomes:
        assert f"rank {silent} did not start compression within 2 s" in outcome
        assert "megatron_compress.install on every rank" in outcome


@pytest.mark.parametrize(
    ("victim", "blow"),
    [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP), (0, signal.SIGKILL)],
    ids=["killed", "silent", "store silent", "store killed"],
)
def test_a_rank_lost_in_training_is_named_by_the_others(pool, victim, blow, tmp_path):
    log = tmp_path / "stderr"
    pool.start(runs.train_until_killed, str(log), world_size=3)
    _wait_until(lambda: _step(log, 2) >= 2, 60)
    os.kill(pool.pids[victim], blow)
    # The timeout is 6 s in this test. Rank 0 keeps the store, without which ranks can only be told apart by it.
    others = [rank for rank in range(3) if rank != victim]
    _wait_until(lambda: all(_names(log, rank, victim, pool.pids[victim]) for rank in others), 30)


def _step(log: Path, rank: int) -> int:
    steps = Path(f"{log}.{rank}.steps")
    return int(steps.read_text() or 0) if steps.exists() else 0


def _names(log: Path, rank: int, victim: int, pid: int) -> bool:
    text = Path(f"{log}.{rank}").read_text()
    return f"rank {victim} (host" in text and f"process {pid})" in text


def _wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time given"
        time.sleep(0.2)


def _finish(group, absent):
    watch = Watch("", "", timeout=6.0)
    watch.start()
    if group.rank() == absent:
        watch.stop()
        return "absent"
    return watch.finish({"rank": group.rank()}, timeout=2.0)


@pytest.mark.parametrize("absent", [None, 2])
def test_the_first_rank_gets_the_last_word_of_those_that_finish(pool, absent):
    words = pool.run(_finish, absent, world_size=3)
    assert words[0] == {rank: {"rank": rank} for rank in range(3) if rank != absent}
    assert words[1] == {}
