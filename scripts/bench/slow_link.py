"""Speed of pipeline training over a slow link, plain and compressed, beside its bound. Needs root.

    .venv/bin/python scripts/bench/slow_link.py --out docs/results/slow_link

Two stages of the model in configs/train/slow_link.yaml train in a `netbed`, on the CPU, in three arms: megatron-core
alone, with hooks that change nothing (`identity`: only the overlap of hooks/overlap.py is new), and compressed. Each
runs over a link without a limit too, which says what a step takes when the link costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from megatron_compress.netbed.units import rate as parse_rate
from megatron_compress.training.provenance import provenance

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/train/slow_link.yaml"
ARMS = {"plain": None, "identity": "identity", "compressed": "tah_quant"}
FREE = "1gbit"  # far more than the two stages can send
WARM_UP = 2  # steps that do not count
MICROBATCHES = 8  # of a step, in CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="2mbit,5mbit,20mbit", help="separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="folder; writes slow_link.json")
    arguments = parser.parse_args()
    free = {name: _run(arguments.out, FREE, name) for name in ARMS}
    cells = []
    for rate in arguments.rates.split(","):
        runs = {name: _run(arguments.out, rate, name) for name in ARMS}
        cells += [_cell(rate, name, run, runs, free) for name, run in runs.items()]
    for cell in cells:
        print(" ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in cell.items()))
    (arguments.out / "slow_link.json").write_text(json.dumps({**provenance(), "free": free, "cells": cells}, indent=1))


def _run(out: Path, rate: str, name: str) -> dict:
    """Seconds of the median step, and bytes that a step sends in each direction."""
    folder = out / f"{rate}_{name}"
    compress = ARMS[name] and ["--compress", ROOT / f"configs/compress/{ARMS[name]}.yaml"]
    train = [
        "bash",
        ROOT / "scripts/pretrain.sh",
        "--config",
        CONFIG,
        "--steps",
        "6",
        "--out",
        folder,
        *(compress or []),
    ]
    bed = [sys.executable, "-m", "megatron_compress", "netbed", "--nodes", "2", "--rate", rate, "--"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run([*bed, *train], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    results = json.loads((folder / "results.json").read_text())
    seconds = [step["seconds"] for step in results["arms"][0]["steps"][WARM_UP:]]
    sent = [int(count.replace(",", "")) for count in re.findall(r": ([\d,]+) bytes sent", done.stderr)]
    rates = [float(value.replace(",", "")) for value in re.findall(r": ([\d.,]+) Mbit/s of payload", done.stderr)]
    steps = len(results["arms"][0]["steps"]) + 0.5 * (4 / 16)  # and an evaluation, a quarter of a step, forward only
    return {
        "seconds": statistics.median(seconds),
        "forward_bytes": sent[0] / steps,
        "backward_bytes": sent[1] / steps,
        "achieved_mbit": min(rates),
    }


def _cell(rate: str, name: str, run: dict, runs: dict, free: dict) -> dict:
    """One arm at one rate. The bound: the larger of compute and the slower direction, and a message to fill the pipe
    and another to drain it."""
    bits = parse_rate(rate)
    wire = [8 * run[f"{direction}_bytes"] / bits for direction in ("forward", "backward")]
    bound = max(free[name]["seconds"], *wire) + sum(wire) / MICROBATCHES
    plain = runs["plain"]
    return {
        "rate": rate,
        "arm": name,
        "seconds": run["seconds"],
        "compute_seconds": free[name]["seconds"],
        "forward_seconds": wire[0],
        "backward_seconds": wire[1],
        "bound_seconds": bound,
        "of_bound": bound / run["seconds"],
        "speed_up": plain["seconds"] / run["seconds"],
        "bytes_ratio": max(plain["forward_bytes"], plain["backward_bytes"])
        / max(run["forward_bytes"], run["backward_bytes"]),
    }


if __name__ == "__main__":
    main()
