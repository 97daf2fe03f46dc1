"""Share of a PP=2 training step that compression takes of the GPU's time, by torch's profiler.

    python scripts/bench/kernel_share.py --out results/kernel_share.json

One GPU computes what both stages compute: configs/train/llama3_8b_8l.yaml, with configs/compress/tah_quant.yaml applied
where the stages would be cut, to the activation and to its gradient, each compressed and decompressed. Nothing is sent.
The share is thus of both stages' GPU time together, without bubbles, transfers and the host's delays, which would make
it smaller, as deeper stages would.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_compress.collectives.p2p import pipeline_spec
from megatron_compress.compressors.base import Compressor
from megatron_compress.config import CompressionConfig
from megatron_compress.ops import extension, library
from megatron_compress.training import distributed
from megatron_compress.training.config import load_experiment
from megatron_compress.training.data import load_corpus
from megatron_compress.training.loop import Trainer
from megatron_compress.training.provenance import provenance
from megatron_compress.training.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "configs/train/llama3_8b_8l.yaml"
COMPRESS = ROOT / "configs/compress/tah_quant.yaml"
WARM_UP, STEPS = 2, 3


class Cut(torch.autograd.Function):
    """Activation and gradient as the next and the previous stage receive them."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, forward: Compressor, backward: Compressor) -> torch.Tensor:
        ctx.compressor = backward
        return _received(x, forward)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return _received(gradient, ctx.compressor), None, None


def _received(x: torch.Tensor, compressor: Compressor) -> torch.Tensor:
    spec = pipeline_spec(x)
    with record_function(f"{compressor.name} encode"):
        payload = compressor.compress(x, spec)
    with record_function(f"{compressor.name} decode"):
        return compressor.decompress(payload, spec, torch.empty_like(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    out = parser.parse_args().out
    library.ready()
    trainer = _trainer()
    for step in range(1, WARM_UP + 1):
        trainer.step(step)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for step in range(WARM_UP + 1, WARM_UP + STEPS + 1):
            trainer.step(step)
        torch.cuda.synchronize()
    result = _shares(profiler) | {"kernels": extension.status(), **provenance()}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _trainer() -> Trainer:
    """Of one process, with the cut in the middle of the model."""
    experiment = load_experiment(TRAIN)
    distributed.stand_alone()
    distributed.initialize(experiment.train.parallel)
    data = experiment.train.data
    corpus = load_corpus(None, data.held_out_fraction, data.sequence_length, load_tokenizer(None))
    trainer = Trainer(experiment, corpus)
    rules = CompressionConfig.load(COMPRESS).pipeline
    compressors = rules.forward.compressor, rules.backward.compressor
    (chunk,) = trainer.chunks
    layers = next(module for module in chunk.modules() if hasattr(module, "layers")).layers
    layers[len(layers) // 2].register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"hidden_states": Cut.apply(kwargs["hidden_states"], *compressors)}),
        with_kwargs=True,
    )
    return trainer


def _shares(profiler: profile) -> dict:
    """Milliseconds of the GPU in a step, in all and for each operation of a compressor."""
    events = profiler.key_averages()
    kernels = sum(e.self_device_time_total for e in events if e.device_type == DeviceType.CUDA)
    named = {e.key: e.device_time_total for e in events if e.key.endswith("code") and e.device_type == DeviceType.CPU}
    return {
        "gpu_ms_a_step": kernels / STEPS / 1e3,
        "compression_ms_a_step": {name: time / STEPS / 1e3 for name, time in named.items()},
        "share": sum(named.values()) / kernels,
    }


if __name__ == "__main__":
    main()
