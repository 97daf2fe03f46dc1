"""Real processes that stay alive over many tests, so that a test costs milliseconds and not imports."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120
GRACE_SECONDS = 5  # for the other ranks, after one has failed


class WorkerPool:
    """`size` processes in one world (gloo, or NCCL with one GPU each), with a subgroup of the first n for every n.

    `run(function, *args, world_size=n)` calls function(group, *args) on ranks 0…n−1, where group is that subgroup, and
    returns their results by rank. function must be importable; a failing rank raises here, with its traceback.
    After a failure the processes are replaced, so that the next test finds none that still waits for another.
    """

    def __init__(self, size: int, backend: str = "gloo"):
        self._size, self._backend = size, backend
        self._launch()

    def _launch(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.pool", "tests.hooks.runs"])
        port = _free_port()
        self._pipes, self._processes = [], []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._size, self._backend, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        if len(self._answers(self._pipes)) < self._size:
            raise TimeoutError(f"{self._size} processes did not start within {TIMEOUT_SECONDS} s")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, function: Callable, *args, world_size: int) -> None:
        """Begin what `run` does, and do not wait for it."""
        for pipe in self._pipes[:world_size]:
            pipe.send((function, args, world_size))

    def run(self, function: Callable, *args, world_size: int) -> list:
        self.start(function, *args, world_size=world_size)
        answers = self._answers(self._pipes[:world_size])
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
        failures += [f"rank {rank} did not answer" for rank in range(world_size) if rank not in answers]
        if failures:
            self._replace(set(range(world_size)) - answers.keys())
            raise AssertionError("\n".join(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def _answers(self, pipes: list) -> dict[int, tuple[bool, object]]:
        """What the ranks answer, those that do within the timeout, or soon after another has failed."""
        answers: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(answers) < len(pipes):
            pending = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = multiprocessing.connection.wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answers[pipes.index(pipe)] = answer = _receive(pipe)
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _replace(self, silent: set[int]) -> None:
        """New processes; those that were silent first print where they are."""
        for rank in silent:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.close()
        self._launch()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _receive(pipe) -> tuple[bool, object]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process is gone"


def _serve(rank: int, size: int, backend: str, port: int, pipe) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    groups = {n: dist.new_group(range(n)) for n in range(1, size + 1)}
    pipe.send((True, "ready"))
    while True:
        gc.collect()  # models are cycles that hold process groups, and each of those holds threads
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
