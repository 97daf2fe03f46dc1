"""A training file small enough to run in seconds, and text for it."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML


@pytest.fixture
def train_values() -> dict:
    """What a training file holds, to be changed by a test and written with `write_files`."""
    return {
        "model": "model.yaml",
        "parallel": {"tensor": 2, "pipeline": 2},
        "data": {"sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 8, "held_out_windows": 4},
        "optimizer": {"lr": 3.0e-3, "min_lr": 3.0e-4, "warmup_steps": 2},
        "run": {"steps": 8},
        "arms": [{"name": "plain"}, {"name": "plain-again", "steps": 5, "equals": "plain"}],
    }


@pytest.fixture
def model_values() -> dict:
    return {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding": "rope",
        "linear_bias": False,
        "tied_embeddings": False,
    }


@pytest.fixture
def write_files(tmp_path):
    """Write both files; the training file's path."""

    def write(train: dict, model: dict) -> Path:
        YAML().dump(model, tmp_path / "model.yaml")
        YAML().dump(train, tmp_path / "train.yaml")
        return tmp_path / "train.yaml"

    return write


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder of 40 short documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} counts: " + " ".join(str(i * j) for j in range(100)))
    return folder


@pytest.fixture
def saving_config(write_files, train_values, model_values) -> Path:
    """A training file of two stages, with dropout, and a checkpoint every four steps."""
    train_values["run"] |= {"save_every": 4, "evaluate_every": 4}
    train_values["parallel"] = {"pipeline": 2}
    train_values["arms"] = []
    return write_files(train_values, {**model_values, "num_layers": 4, "dropout": 0.1})
