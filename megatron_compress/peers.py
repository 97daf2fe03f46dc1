"""The other ranks: do they run the same configuration, and are they still there? (DESIGN D11)

Both questions go through the rendezvous store, not through collectives, so that a rank without hooks, or one that
hangs, is named instead of leaving the others waiting for ever.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
import time

import torch.distributed as dist

from megatron_compress.wire import WIRE_VERSION

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 2.0
# Installations of this process, so that keys in the store are not used twice; equal on all ranks.
_generation = 0


class PeerError(RuntimeError):
    """A rank differs or does not answer; the message names it."""


class Watch:
    """Start-up check of all ranks, then a heartbeat: each rank watches the next one.

    Args:
        digest: of the configuration.
        version: of Megatron, as text.
        timeout: seconds without an answer after which a rank is given up.
    """

    def __init__(self, digest: str, version: str, timeout: float):
        from megatron_compress import __version__

        self._facts = {
            "megatron_compress": __version__,
            "wire format": WIRE_VERSION,
            "configuration": digest,
            "Megatron": version,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._timeout = timeout
        self._stopped = threading.Event()
        self._watching = False
        self.rank, self.size = 0, 1

    def start(self) -> None:
        """Compare with all ranks, then watch. Every rank calls it.

        Raises:
            PeerError: a rank differs, or has not called within the timeout.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        global _generation
        _generation += 1
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"megatron_compress/{_generation}", store.clone())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store.set(f"facts/{self.rank}", json.dumps(self._facts))
        if self.rank == 0:
            self._store.set("verdict", self._compare())
        if not self._wait_for("verdict", self._timeout + 5):
            time.sleep(
                _BEAT_SECONDS
            )  # the others find out too, before rank 0 misses this one and takes the store along
            raise PeerError(_silent([0], self._timeout))
        if verdict := self._store.get("verdict").decode():
            self._store.set(f"heard/{self.rank}", "yes")
            if self.rank == 0:
                self._wait_for_all("heard", 2 * _BEAT_SECONDS)  # the store may end with this process
            raise PeerError(verdict)
        self._first = self._names([0])
        threading.Thread(target=self._beat, name="megatron_compress peers", daemon=True).start()
        self._watching = True

    def stop(self) -> None:
        """End the heartbeat; the watching rank takes it for a proper end."""
        self._stopped.set()
        if self._watching:
            self._watching = False
            self._store.set(f"beat/{self.rank}", "end")

    def finish(self, value: object, timeout: float) -> dict[int, object]:
        """`stop`, and exchange a last word: what each rank passed here, by rank, on rank 0; nothing on the others.

        It needs no process group, which a script may have destroyed by then, and does without the ranks that have not
        called it after `timeout` seconds.
        """
        if not self._watching:
            return {0: value}
        self.stop()
        # The last use of the store, which may live in rank 0 and end when that has heard all.
        self._store.set(f"value/{self.rank}", pickle.dumps(value))
        if self.rank != 0:
            return {}
        missing = self._wait_for_all("value", timeout)
        here = [rank for rank in range(self.size) if rank not in missing]
        return {rank: pickle.loads(self._store.get(f"value/{rank}")) for rank in here}

    def explain(self, error: Exception) -> None:
        """After an error that may come from a lost peer: name the ranks whose heartbeat has stopped.

        Raises:
            PeerError: some have; the ranks that live wait here long enough to be told apart from them.
        """
        if not self._watching:
            return
        before = self._beats()
        time.sleep(3 * _BEAT_SECONDS)
        after = self._beats()
        lost = [rank for rank in range(self.size) if after[rank] == before[rank] != b"end"]
        if lost:
            raise PeerError(self._announce(f"{self._names(lost)} stopped answering")) from error

    def _beats(self) -> list[bytes | None]:
        return [self._read_beat(rank) for rank in range(self.size)]

    def _read_beat(self, rank: int) -> bytes | None:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else None

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(_who(rank, json.loads(self._store.get(f"facts/{rank}"))) for rank in ranks)

    def _compare(self) -> str:
        """What is wrong, on rank 0; empty if nothing."""
        if missing := self._wait_for_all("facts", self._timeout):
            return _silent(missing, self._timeout)
        problems = []
        for rank in range(1, self.size):
            facts = json.loads(self._store.get(f"facts/{rank}"))
            for name in ("megatron_compress", "wire format", "configuration", "Megatron"):
                if facts[name] != self._facts[name]:
                    problems.append(
                        f"{_who(rank, facts)} has {name} {facts[name]}, rank 0 has {self._facts[name]}; "
                        "start all ranks with the same file and versions"
                    )
        return "\n".join(problems)

    def _wait_for_all(self, key: str, seconds: float) -> list[int]:
        """Wait until every rank has set its `key`; those that have not after `seconds`."""
        deadline = time.monotonic() + seconds
        return [
            rank
            for rank in range(self.size)
            if not self._wait_for(f"{key}/{rank}", max(0.0, deadline - time.monotonic()))
        ]

    def _wait_for(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._check(key):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _check(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except dist.DistNetworkError as error:
            raise PeerError(
                "the rendezvous store, kept by the launcher or by rank 0, ended while the ranks were compared; "
                "another rank says why"
            ) from error

    def _beat(self) -> None:
        """Count up in the store, and look whether the next rank does; end the process if a rank is lost."""
        watched = (self.rank + 1) % self.size
        last, seen, count = None, time.monotonic(), 0
        while not self._stopped.wait(_BEAT_SECONDS):
            count += 1
            beat, lost = self._exchange(count, watched)
            if beat != last or beat == b"end":
                last, seen = beat, time.monotonic()
            elif time.monotonic() - seen > self._timeout:
                lost = f"{self._names([watched])} has not answered for {self._timeout:.0f} s"
            if lost:
                self._give_up(self._announce(lost))

    def _exchange(self, count: int, watched: int) -> tuple[bytes | None, str | None]:
        """Write one's own count; read the watched rank's, and what was announced, if anything."""
        silent = f"the rendezvous store does not answer; it is kept by the launcher or by {self._first}"
        # A store whose host is stopped blocks for ever, whatever timeout it was given.
        guard = threading.Timer(self._timeout, self._give_up, [silent])
        guard.daemon = True
        guard.start()
        try:
            self._store.set(f"beat/{self.rank}", str(count))
            lost = self._store.get("lost").decode() if self._store.check(["lost"]) else None
            return self._read_beat(watched), lost
        except RuntimeError:
            self._give_up(silent)
            raise
        finally:
            guard.cancel()

    def _announce(self, reason: str) -> str:
        """Tell all ranks, and stay long enough for them to hear it: the store may live in this process."""
        self._store.set("lost", reason)
        time.sleep(2 * _BEAT_SECONDS)
        return reason

    def _give_up(self, reason: str) -> None:
        """The main thread may be inside a collective that nothing can interrupt, so the process ends here."""
        if not self._stopped.is_set() and not sys.is_finalizing():
            print(f"megatron_compress: {reason}; rank {self.rank} ends too", file=sys.stderr, flush=True)
            os._exit(1)


def _who(rank: int, facts: dict) -> str:
    return f"rank {rank} (host {facts['host']}, process {facts['pid']})"


def _silent(ranks: list[int], timeout: float) -> str:
    names = ", ".join(map(str, ranks))
    return (
        f"rank {names} did not start compression within {timeout:.0f} s of the others; "
        "call megatron_compress.install on every rank, before the first step"
    )
