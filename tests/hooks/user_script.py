"""A training script as users have them, at two tensor-parallel ranks: it knows Megatron only, and takes arguments.

Usage: user_script.py OUT [--auto] [--fail-rank N]; writes each rank's losses to OUT.RANK.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from megatron_compress import cpu

cpu.apply()  # what a GPU would not need

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

if "--auto" in sys.argv:
    import megatron_compress.auto  # noqa: F401

SEQUENCE, STEPS = 32, 3


def build() -> GPTModel:
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(normalization="LayerNorm"), 256, SEQUENCE)


def forward_step(data, model):
    tokens = next(data)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    losses = model(tokens[:, :-1], torch.arange(SEQUENCE).expand(2, -1), mask, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--fail-rank", type=int)
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2)
    rank = torch.distributed.get_rank()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    schedule = partial(get_forward_backward_func(), forward_step_func=forward_step, model=model)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(256, (2, SEQUENCE + 1), generator=generator)
        optimizer.zero_grad()
        (result,) = schedule(data_iterator=iter([tokens]), num_microbatches=1, seq_length=SEQUENCE, micro_batch_size=2)
        losses.append(result["loss"].item())
        optimizer.step()
    Path(f"{options.out}.{rank}").write_text(repr(losses))
    if options.fail_rank == rank:
        raise ValueError("the script's own trouble")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
