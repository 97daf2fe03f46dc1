"""The command, once in each node, as a launcher would start it on so many machines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import torch

from megatron_compress.netbed import owner
from megatron_compress.netbed.chain import INTERFACE, Chain
from megatron_compress.netbed.errors import BedError
from megatron_compress.netbed.namespaces import inside

_PORT = "29500"  # nothing else listens in a namespace of our own
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0


class Nodes:
    """The running commands. Leaving the `with` block stops those that still run."""

    def __init__(self, chain: Chain, command: list[str]):
        shares = gpu_shares(chain.num_nodes)
        self._processes: list[subprocess.Popen] = []
        for node in range(chain.num_nodes):
            with inside(owner.name(node)):
                # A session of its own: Ctrl-C reaches this process alone, which then stops the nodes in order.
                environment = {**os.environ, **variables(chain, node, shares[node])}
                self._processes.append(_start(command, environment))

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def wait(self) -> tuple[int, int | None]:
        """Until all have ended, or one has failed; its status and which it is, or 0 and None."""
        while True:
            statuses = [process.poll() for process in self._processes]
            for node, status in enumerate(statuses):
                if status:
                    return (status if status > 0 else 128 - status), node
            if None not in statuses:
                return 0, None
            time.sleep(_POLL_SECONDS)

    def _running(self) -> list[subprocess.Popen]:
        return [process for process in self._processes if process.poll() is None]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    try:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BedError(f"{command[0]} cannot be started: {error.strerror}") from error


def variables(chain: Chain, node: int, gpus: list[str]) -> dict[str, str]:
    """What a node's environment says of its place, and what keeps NCCL from ways around the links."""
    return {
        "NNODES": str(chain.num_nodes),
        "NODE_RANK": str(node),
        "NPROC": os.environ.get("NPROC", str(max(1, len(gpus)))),
        "MASTER_ADDR": chain.address(0),
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": f"netbed-{node}",
        "NCCL_IB_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }


def gpu_shares(num_nodes: int) -> list[list[str]]:
    """The visible GPUs, divided evenly; nothing for any node on a machine without.

    Raises:
        BedError: they do not divide.
    """
    count = torch.cuda.device_count()
    if count % num_nodes:
        raise BedError(
            f"{num_nodes} nodes cannot share {count} GPUs evenly; set CUDA_VISIBLE_DEVICES to a multiple of "
            f"{num_nodes}, or to nothing for the CPU"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus, share = visible.split(",")[:count], count // num_nodes
    return [gpus[node * share : (node + 1) * share] for node in range(num_nodes)]
