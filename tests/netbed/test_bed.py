"""A bed has the rate that was asked for, runs a command in every node, and leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pyroute2 import netns

from megatron_compress.netbed import owner
from megatron_compress.netbed.bed import Interrupted, opened
from megatron_compress.netbed.chain import Chain, Link
from megatron_compress.netbed.errors import BedError

pytestmark = pytest.mark.usefixtures("can_build")

RATE = 20e6
SIZE = 500_000
# Node 0 takes SIZE bytes from each of the others.
TALK = f"""
import os, socket, time
place, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["NODE_RANK"])
if rank == 0:
    server = socket.create_server(place)
    for _ in range(int(os.environ["NNODES"]) - 1):
        connection, _ = server.accept()
        assert sum(iter(lambda: len(connection.recv(65536)), 0)) == {SIZE}
else:
    for _ in range(100):
        try:
            connection = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.sendall(bytes({SIZE}))
"""


def _namespaces() -> set[str]:
    return {name for name in netns.listnetns() if name.startswith("netbed.")}


@pytest.fixture(autouse=True)
def nothing_left():
    before = _namespaces()
    yield
    assert _namespaces() <= before


def test_the_links_of_a_chain_carry_their_rate_and_no_more():
    with opened(Chain(3, RATE)) as bed:
        assert len(bed.achieved) == 4
        assert all(0.85 * RATE < achieved.rate < RATE for achieved in bed.achieved)
        before, start = bed.bytes_sent(), time.monotonic()
        assert bed.run([sys.executable, "-c", TALK]) == (0, None)
        seconds = time.monotonic() - start
        sent = {link: count - before[link] for link, count in bed.bytes_sent().items()}
    assert SIZE < sent[Link(2, 1)] < 1.1 * SIZE
    assert 2 * SIZE < sent[Link(1, 0)] < 1.1 * 2 * SIZE  # through node 1 too
    assert sent[Link(0, 1)] < 0.2 * SIZE
    assert seconds > 8 * 2 * SIZE / RATE


@pytest.mark.slow
def test_a_rate_that_no_link_can_have_is_an_error():
    with pytest.raises(BedError, match="Mbit/s of payload"), opened(Chain(2, 30e9)):
        pass


def test_a_delay_is_there_or_refused():
    """Not every kernel has netem; where there is none the error says what to do."""
    try:
        with opened(Chain(2, RATE, delay=5e-3)) as bed:
            assert all(10e-3 < achieved.round_trip < 30e-3 for achieved in bed.achieved)
    except BedError as error:
        assert "cannot make links with a delay: load its module (modprobe sch_netem)" in str(error)


def test_one_node_that_fails_ends_the_others():
    start = time.monotonic()
    with opened(Chain(3, RATE)) as bed:
        assert bed.run(["bash", "-c", "[[ $NODE_RANK == 1 ]] && exit 3; sleep 600"]) == (3, 1)
    assert time.monotonic() - start < 60


def _start(marker: Path, command: str = "sleep 600") -> subprocess.Popen:
    """The command line with a command that ignores SIGTERM and leaves a process of its own session."""
    script = f"trap '' TERM; touch {marker}.$NODE_RANK; setsid {command} & {command}; wait"
    arguments = ["netbed", "--nodes", "2", "--rate", "20mbit", "--", "bash", "-c", script]
    process = subprocess.Popen([sys.executable, "-m", "megatron_compress", *arguments], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not all(marker.with_name(f"{marker.name}.{node}").exists() for node in range(2)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process


def _alive(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [entry.parent.name] if text.encode() in entry.read_bytes() else []
        except OSError:
            continue
    return found


def test_ctrl_c_leaves_nothing(tmp_path):
    seconds = f"6{os.getpid()}"  # marks our own sleeping processes
    process = _start(tmp_path / "started", f"sleep {seconds}")
    assert _alive(seconds)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # an impatient user
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert not _alive(seconds)


def test_sigterm_leaves_nothing():
    seconds = f"7{os.getpid()}"
    with pytest.raises(Interrupted), opened(Chain(2, RATE)) as bed:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        bed.run(["sleep", seconds])
    assert not _alive(seconds)


@pytest.mark.slow
def test_only_what_a_dead_run_left_is_removed(tmp_path):
    process = _start(tmp_path / "started")
    theirs = {name for name in _namespaces() if name.split(".")[1] == str(process.pid)}
    assert len(theirs) == 2
    with opened(Chain(2, RATE)) as bed:
        assert not bed.orphans
        assert _namespaces() == theirs | {owner.name(0), owner.name(1)}
    assert _namespaces() == theirs
    process.kill()
    process.wait()
    assert _namespaces() == theirs
    with opened(Chain(2, RATE)) as bed:
        assert set(bed.orphans) == theirs


@pytest.mark.slow
def test_without_the_right_to_it_the_error_says_so(without_admin):
    arguments = ["netbed", "--nodes", "2", "--rate", "20mbit", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_compress", *arguments],
        preexec_fn=without_admin,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "not permitted: run as root" in done.stderr
