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
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_compress.netbed.units import rate as parse_rate
from megatron_compress.planner.schedule import message_seconds
from megatron_compress.training.provenance import provenance

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/train/slow_link.yaml"
ARMS = {"identity": "identity", "plain": None, "compressed": "tah_quant"}
FREE = "1gbit"  # far more than the two stages can send
STEPS, WARM_UP = 4, 1  # of a run, and how many of them do not count
MICROBATCHES, EVALUATED = 8, 2  # of a step, and of the evaluation at the end, in CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="2mbit,10mbit", help="separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="folder; writes slow_link.json")
    arguments = parser.parse_args()
    runs = {rate: {name: _run(rate, name) for name in ARMS} for rate in (FREE, *arguments.rates.split(","))}
    cells = [_cell(rate, name, runs) for rate in runs if rate != FREE for name in ARMS]
    for cell in cells:
        print(", ".join(f"{key} {value:.3g}" if isinstance(value, float) else value for key, value in cell.items()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "slow_link.json").write_text(json.dumps({**provenance(), "runs": runs, "cells": cells}, indent=1))


def _run(rate: str, name: str) -> dict:
    """Seconds of the median step, and the bytes of a message in each direction where the hooks count them."""
    with tempfile.TemporaryDirectory() as folder:
        compress = ["--compress", ROOT / f"configs/compress/{ARMS[name]}.yaml"] if ARMS[name] else []
        train = ["bash", ROOT / "scripts/pretrain.sh", "--config", CONFIG, "--steps", STEPS, "--out", folder, *compress]
        bed = [sys.executable, "-m", "megatron_compress", "netbed", "--nodes", "2", "--rate", rate, "--"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run([*map(str, [*bed, *train])], capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        (arm,) = json.loads((Path(folder) / "results.json").read_text())["arms"]
    seconds = [step["seconds"] for step in arm["steps"]]
    result = {"seconds": statistics.median(seconds[WARM_UP:]), "steps": seconds, "netbed": done.stderr.splitlines()}
    if arm["report"]:
        totals = {total["direction"]: total["wire_bytes"] for total in arm["report"]["totals"]}
        result["forward"] = totals["forward"] // (STEPS * MICROBATCHES + EVALUATED)
        result["backward"] = totals["backward"] // (STEPS * MICROBATCHES)
    print(rate, name, f"{result['seconds']:.2f} s a step", file=sys.stderr)
    return result


def _cell(rate: str, name: str, runs: dict) -> dict:
    """One arm at one rate. The bound: the larger of compute and the slower direction of the link for all microbatches,
    and a message in each direction to fill the pipe and drain it."""
    plain, counted = runs[rate]["plain"], "identity" if name == "plain" else name
    sizes = [runs[rate][counted][direction] for direction in ("forward", "backward")]
    messages = [message_seconds(size, parse_rate(rate)) for size in sizes]
    seconds, compute = runs[rate][name]["seconds"], runs[FREE][name]["seconds"]
    bound = max(compute, *(MICROBATCHES * message for message in messages)) + sum(messages)
    return {
        "rate": rate,
        "arm": name,
        "seconds": seconds,
        "compute_seconds": compute,
        "forward_bytes": float(sizes[0]),
        "backward_bytes": float(sizes[1]),
        "bound_seconds": bound,
        "of_bound": bound / seconds,
        "speed_up": plain["seconds"] / seconds,
        "bytes_ratio": runs[rate]["identity"]["backward"] / max(sizes),
    }


if __name__ == "__main__":
    main()
