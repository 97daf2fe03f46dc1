"""Run by torchrun for test_resume.py: in each layout an uninterrupted run, and one that goes on from its middle.

Prints one JSON object a layout: {"layout": name, "whole": [loss, ...], "resumed": [loss, ...], "steps": of resumed}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist
from ruamel.yaml import YAML

from megatron_compress import cpu

cpu.apply()

from megatron.core import parallel_state  # noqa: E402

from megatron_compress.training import distributed  # noqa: E402
from megatron_compress.training.config import ArmConfig, ParallelConfig, load_experiment  # noqa: E402
from megatron_compress.training.data import load_corpus  # noqa: E402
from megatron_compress.training.loop import pretrain  # noqa: E402

_COMPRESS = Path(__file__).parents[2] / "configs/compress/mixed.yaml"
_AQ_SGD = _COMPRESS.with_name("aq_sgd.yaml")
LAYOUTS = {
    "tensor, sequence-parallel, recomputed, compressed": (
        {"tensor": 2, "sequence_parallel": True},
        {"recompute": True},
        {"compress": str(_COMPRESS)},
    ),
    "pipeline, compressed": ({"pipeline": 2}, {}, {"compress": str(_COMPRESS)}),
    "pipeline, remembering samples": ({"pipeline": 2}, {}, {"compress": str(_AQ_SGD)}),
    "virtual pipeline": ({"pipeline": 2, "virtual_pipeline": 2}, {}, {}),
    "data": ({}, {}, {}),
    "data, distributed optimizer, bf16": ({"distributed_optimizer": True}, {"precision": "bf16"}, {}),
    "tensor, bf16": ({"tensor": 2}, {"precision": "bf16"}, {}),
}


def main(config: Path, text: Path) -> None:
    values = YAML(typ="safe").load(config)
    distributed.initialize(ParallelConfig())
    parallel_state.destroy_model_parallel()
    for number, (name, (parallel, run, arm)) in enumerate(LAYOUTS.items()):
        epoch = {"epoch_windows": 16} if "samples" in name else {}  # two steps an epoch
        file = config.with_name(f"layout{number}.rank{os.environ['RANK']}.yaml")
        YAML().dump(
            {**values, "parallel": parallel, "data": {**values["data"], **epoch}, "run": {**values["run"], **run}}, file
        )
        _compare(name, file, ArmConfig(name="train", **arm), text, config.parent / f"layout{number}")


def _compare(name: str, file: Path, arm: ArmConfig, text: Path, out: Path) -> None:
    experiment = load_experiment(file)
    corpus = load_corpus(text, 0.1, experiment.train.data.sequence_length)
    distributed.lay_out(experiment.train.parallel)
    whole = pretrain(experiment, corpus, arm, out, resume=False)
    middle = out.with_name(out.name + ".resumed")
    if distributed.is_first_rank():
        _keep_the_first_checkpoint(out, middle)
    dist.barrier()
    resumed = pretrain(experiment, corpus, arm, middle, resume=True)
    if distributed.is_first_rank():
        losses = {
            key: [step.loss_hex for step in result.steps] + [record.held_out_loss_hex for record in result.held_out]
            for key, result in (("whole", whole), ("resumed", resumed))
        }
        log = [json.loads(line) for line in (middle / "train.jsonl").read_text().splitlines()]
        print(json.dumps({"layout": name, **losses, "log": len(log)}), flush=True)
    parallel_state.destroy_model_parallel()


def _keep_the_first_checkpoint(out: Path, to: Path) -> None:
    shutil.copytree(out, to)
    first, last = sorted((to / "checkpoints").glob("step_*"))
    shutil.rmtree(last)
    (to / "checkpoints/latest").write_text(first.name)


if __name__ == "__main__":
    distributed.run_and_exit(lambda: main(Path(sys.argv[1]), Path(sys.argv[2])) or 0)
