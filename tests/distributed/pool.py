"""Real processes that stay alive over many tests, so that a test costs milliseconds and not imports."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120


class WorkerPool:
    """`size` processes in one world (gloo, or NCCL with one GPU each), with a subgroup of the first n for every n.

    `run(function, *args, world_size=n)` calls function(group, *args) on ranks 0…n−1, where group is that subgroup, and
    returns their results by rank. function must be importable; a failing rank raises here, with its traceback.
    """

    def __init__(self, size: int, backend: str = "gloo"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.pool", "tests.hooks.runs"])
        port = _free_port()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, backend, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            _receive(pipe)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, function: Callable, *args, world_size: int) -> None:
        """Begin what `run` does, and do not wait for it."""
        for pipe in self._pipes[:world_size]:
            pipe.send((function, args, world_size))

    def run(self, function: Callable, *args, world_size: int) -> list:
        self.start(function, *args, world_size=world_size)
        results = [_receive(pipe) for pipe in self._pipes[:world_size]]
        if failures := [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _receive(pipe):
    if not pipe.poll(TIMEOUT_SECONDS):
        raise TimeoutError(f"a worker did not answer within {TIMEOUT_SECONDS} s")
    return pipe.recv()


def _serve(rank: int, size: int, backend: str, port: int, pipe) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    groups = {n: dist.new_group(range(n)) for n in range(1, size + 1)}
    pipe.send("ready")
    while True:
        function, args, world_size = pipe.recv()
        try:
            pipe.send((True, function(groups[world_size], *args)))
        except Exception:
            traceback.print_exc()
            pipe.send((False, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
