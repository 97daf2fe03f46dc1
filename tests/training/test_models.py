"""The named models have the sizes that they are known by."""

from pathlib import Path

import pytest

from megatron_compress import strict_yaml
from megatron_compress.training.model_config import ModelConfig

FOLDER = Path(__file__).parents[2] / "configs/models"
# Parameters in millions, as their publishers give them; of OLMo-2 and our own, as their shapes make it.
MILLIONS = {
    "gpt2_byte_4l": 0.8,
    "gpt2_small": 124.4,
    "gpt2_xl": 1557.6,
    "llama3_2_1b": 1235.8,
    "llama3_8b": 8030.3,
    "llama3_8b_8l": 1747.0,
    "llama_byte_100m": 110.5,
    "llama_byte_2l": 1.3,
    "olmo2_150m": 224.8,
    "olmo2_370m": 474.0,
    "olmo2_70m": 123.6,
    "qwen2_5_3b": 3085.9,
    "qwen2_5_7b": 7615.6,
    "smollm2_135m": 134.5,
    "tinyllama_1_1b": 1100.0,
}


def _parameters(model: ModelConfig) -> int:
    h, f = model.hidden_size, model.ffn_hidden_size
    d = model.head_dim or h // model.num_attention_heads
    queries = model.num_attention_heads * d
    keys_and_values = 2 * (model.num_query_groups or model.num_attention_heads) * d
    norm = h * (2 if model.normalization == "LayerNorm" else 1)
    layer = h * (2 * queries + keys_and_values) + (3 if model.activation == "swiglu" else 2) * h * f + 2 * norm
    layer += (queries + keys_and_values) * (model.linear_bias or model.qkv_bias) + (2 * h + f) * model.linear_bias
    layer += 2 * d * model.qk_norm
    embeddings = model.vocab_size * h * (1 if model.tied_embeddings else 2)
    positions = (model.max_positions or 128) * h if model.position_embedding == "learned" else 0
    return model.num_layers * layer + embeddings + positions + norm


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_size(file):
    size = _parameters(strict_yaml.load(file, ModelConfig)) / 1e6
    assert size == pytest.approx(MILLIONS[file.stem], rel=0.01, abs=0.05)
