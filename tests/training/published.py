"""Tiny models with random weights in the files of publishers: Hugging Face's folders, and GGUF.

`LOGITS` is what transformers computes from the folders. To make it anew, with transformers installed:
`python -m tests.training.published`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

TOKENS = [[(7 * i * i + 3) % 96 for i in range(16)]]
_SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama": {**_SHAPE, **_HEADS, "model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": False},
    "llama3": {
        **_SHAPE,
        **_HEADS,
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192},
        "head_dim": 32,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen2": {**_SHAPE, **_HEADS, "model_type": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen3": {
        **_SHAPE,
        **_HEADS,
        "model_type": "qwen3",
        "rope_theta": 1000000.0,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 24,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
}
# transformers 5.24.0, torch 2.13.0 on the CPU: logits 0 to 3 of the sixth and of the last token of TOKENS.
LOGITS = {
    "llama": [[0.46379, 1.89762, 1.05266, -2.1304], [-2.20981, -0.46303, -1.84428, 1.82193]],
    "llama3": [[0.01828, -1.71491, 1.68225, 1.1557], [0.23783, -0.57932, -1.66516, -1.65721]],
    "qwen2": [[2.21909, 0.82812, -1.45147, -0.52812], [2.514, 0.28336, -1.87719, 1.91089]],
    "qwen3": [[1.28176, -1.18753, 0.69903, 1.00795], [1.59511, -1.08698, 0.46209, 2.52217]],
    "gpt2": [[-0.90293, -0.95655, 0.75543, 1.27364], [-1.9106, 0.25757, 1.46333, -1.74875]],
}


def weights(kind: str) -> dict[str, np.ndarray]:
    """Under Hugging Face's names, float32; large enough that attention is far from uniform."""
    config, draw = CONFIGS[kind], np.random.RandomState(0)
    shapes = _gpt2_shapes(config) if kind == "gpt2" else _llama_shapes(config)
    values = {}
    for name, shape in shapes.items():
        is_norm = "norm" in name or "ln_" in name
        scale = 0.1 if is_norm or name.endswith("bias") else 0.3
        values[name] = (draw.randn(*shape) * scale + (is_norm and name.endswith("weight"))).astype(np.float32)
    return values


def _llama_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = config.get("head_dim", h // config["num_attention_heads"])
    rows = {"q": config["num_attention_heads"] * d, "k": config["num_key_value_heads"] * d}
    rows["v"] = rows["k"]
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for part, size in rows.items():
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (size, h)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (size,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}self_attn.{part}_norm.weight": (d,) for part in "qk"}
        shapes[f"{layer}self_attn.o_proj.weight"] = (h, rows["q"])
        shapes |= {f"{layer}mlp.{part}_proj.weight": (f, h) for part in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (h, f)
        shapes |= {f"{layer}{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
    return shapes if config["tie_word_embeddings"] else {**shapes, "lm_head.weight": (v, h)}


def _gpt2_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Linear layers are [in, out]."""
    h = config["n_embd"]
    linear = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "mlp.c_fc": (h, 4 * h), "mlp.c_proj": (4 * h, h)}
    shapes = {"wte.weight": (config["vocab_size"], h), "wpe.weight": (config["n_positions"], h)}
    for i in range(config["n_layer"]):
        for name, (rows, columns) in linear.items():
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
        shapes |= {f"h.{i}.{norm}.{part}": (h,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return {**shapes, "ln_f.weight": (h,), "ln_f.bias": (h,)}


def write_folder(kind: str, folder: Path, **changes) -> Path:
    """config.json, with `changes`, and the weights in two .safetensors files."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[kind], **changes}))
    items, index = list(weights(kind).items()), {}
    for number, part in enumerate((items[::2], items[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(dict(part), folder / file, metadata={"format": "pt"})
        index |= {name: file for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def write_gguf(kind: str, file: Path) -> Path:
    """As llama.cpp's converter does: its names, LLaMA's queries and keys reordered, GPT-2's matrices turned."""
    import gguf

    config = CONFIGS[kind]
    layers = config.get("n_layer") or config["num_hidden_layers"]
    heads = config.get("n_head") or config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(file), kind)
    writer.add_block_count(layers)
    writer.add_embedding_length(config.get("n_embd") or config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * config["n_embd"])
    writer.add_head_count(heads)
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    if kind == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], layers)
    for name, weight in weights(kind).items():
        if kind == "gpt2" and ".c_" in name and weight.ndim == 2:
            weight = weight.T
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads if "q_proj" in name else config["num_key_value_heads"]
            weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _print_logits() -> None:
    import torch
    import transformers

    for kind in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            model = transformers.AutoModelForCausalLM.from_pretrained(write_folder(kind, Path(folder)))
            with torch.no_grad():
                logits = model.float().eval()(torch.tensor(TOKENS)).logits[0]
        rows = [[round(value, 5) for value in logits[i, :4].tolist()] for i in (5, -1)]
        print(f'    "{kind}": {rows},')


if __name__ == "__main__":
    _print_logits()
