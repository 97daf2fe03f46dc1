"""From a model file to megatron-core's own GPTModel, one DDP-wrapped chunk for each virtual stage of this rank."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_compress import cpu
from megatron_compress.training.attention import SdpaAttention
from megatron_compress.training.config import Experiment
from megatron_compress.training.distributed import device
from megatron_compress.training.model_config import ModelConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "swiglu": F.silu}
_POSITIONS = {"learned": "learned_absolute", "rope": "rope"}


def params_dtype(experiment: Experiment) -> torch.dtype:
    return _DTYPES[experiment.train.run.precision]


def transformer_config(experiment: Experiment) -> TransformerConfig:
    """megatron-core's config: the model, the layout, and no fused kernel that only exists for CUDA."""
    model, parallel, run = experiment.model, experiment.train.parallel, experiment.train.run
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        init_method_std=model.init_std,
        activation_func=_ACTIVATIONS[model.activation],
        gated_linear_unit=model.activation == "swiglu",
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        masked_softmax_fusion=False,
        # Weights drawn on the CPU are drawn whole and then cut, so they do not depend on the tensor-parallel size.
        use_cpu_initialization=device().type == "cpu",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        sequence_parallel=parallel.sequence_parallel,
        # Batched messages with two stages and virtual stages mix up activations and gradients (Megatron-LM #1450).
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        # megatron-core 0.16 frees an output before its overlapped send has ended, and other bytes arrive.
        deallocate_pipeline_outputs=parallel.virtual_pipeline is None,
        pipeline_dtype=params_dtype(experiment),
        params_dtype=params_dtype(experiment),
        bf16=run.precision == "bf16",
        deterministic_mode=run.deterministic,
        **(recompute if run.recompute else {}),
    )


def build_model(experiment: Experiment) -> list[DistributedDataParallel]:
    """This rank's chunks, in order of virtual stage. Weights come from the random states as they stand."""
    cpu.shim_norm()  # without apex and Transformer-Engine GPUs need it as well
    config = transformer_config(experiment)
    config.finalize_model_grads_func = finalize_model_grads
    virtual_size = experiment.train.parallel.virtual_pipeline
    stages = [None] if virtual_size is None else range(virtual_size)
    return [_wrap(_build_chunk(experiment, config, stage), config, experiment) for stage in stages]


def _build_chunk(experiment: Experiment, config: TransformerConfig, stage: int | None) -> GPTModel:
    model: ModelConfig = experiment.model
    where = {"ignore_virtual": False, "vp_stage": stage}
    scaling = {"rope_scaling": True, "rope_scaling_factor": model.rotary_scaling_factor}
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(model),
        vocab_size=_padded_vocabulary(model.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=model.max_positions or experiment.train.data.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type=_POSITIONS[model.position_embedding],
        rotary_base=model.rotary_base,
        vp_stage=stage,
        **(scaling if model.rotary_scaling_factor else {}),
    )


def _layer_spec(model: ModelConfig) -> ModuleSpec:
    """megatron-core's own layers; on GPUs without the softmax that keeps all scores of a sequence in memory."""
    spec = get_gpt_layer_local_spec(normalization=model.normalization, qk_layernorm=model.qk_norm)
    if device().type == "cuda":
        spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def _padded_vocabulary(vocab_size: int, tensor_parallel_size: int) -> int:
    """The embedding is cut into equal parts."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def _wrap(chunk: GPTModel, config: TransformerConfig, experiment: Experiment) -> DistributedDataParallel:
    chunk = chunk.to(device())
    if config.bf16:
        chunk = Float16Module(config, chunk)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=experiment.train.parallel.distributed_optimizer
    )
    return DistributedDataParallel(config, ddp_config, chunk)
