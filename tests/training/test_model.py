"""Both model families build as megatron-core models of the size that their file says, and know nothing yet."""

import math
import os

import pytest
import torch

from megatron_compress import cpu

cpu.apply()

from megatron_compress.training import distributed  # noqa: E402
from megatron_compress.training.config import ParallelConfig, load_experiment  # noqa: E402
from megatron_compress.training.data import load_corpus  # noqa: E402
from megatron_compress.training.loop import Trainer  # noqa: E402

LLAMA = {}
GPT2 = {
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "position_embedding": "learned",
    "linear_bias": True,
    "tied_embeddings": True,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """A world of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "0")
        distributed.initialize(ParallelConfig())
        yield
        distributed.finalize()


def _size(model: dict, length: int) -> int:
    """Parameters by hand: embeddings, attention, MLP, norms."""
    h, f, layers = model["hidden_size"], model["ffn_hidden_size"], model["num_layers"]
    if model["activation"] == "swiglu":
        query_and_output, key_and_value, mlp, norm = 2 * h * h, 2 * h * h // 2, 3 * h * f, h
        return 2 * 256 * h + layers * (query_and_output + key_and_value + mlp + 2 * norm) + norm
    attention, mlp, norm = 4 * h * h + 4 * h, 2 * h * f + f + h, 2 * h
    return (256 + length) * h + layers * (attention + mlp + 2 * norm) + norm


@pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_size_and_first_losses(write_files, train_values, model_values, text, family):
    train_values["parallel"] = {}
    model = {**model_values, **family}
    experiment = load_experiment(write_files(train_values, model))
    trainer = Trainer(experiment, load_corpus(text, 0.1, 32))
    (chunk,) = trainer.chunks
    assert sum(parameter.numel() for parameter in chunk.parameters()) == _size(model, length=32)
    before = trainer.evaluate(0)
    assert before.held_out_loss == pytest.approx(math.log(256), abs=0.1)
    assert float.fromhex(before.held_out_loss_hex) == before.held_out_loss
    records = [trainer.step(step) for step in range(1, 5)]
    assert trainer.evaluate(4).held_out_loss < before.held_out_loss
    assert records[1].lr == pytest.approx(3.0e-3) and records[3].lr < records[2].lr < records[1].lr


def test_a_failed_rank_says_which_it_is(monkeypatch, capsys):
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setenv("RANK", "3")
    distributed.run_and_exit(lambda: torch.zeros(2) @ torch.zeros(3))
    assert statuses == [1]
    assert "rank 3 failed" in capsys.readouterr().err
