"""Published models, in the files that people have, become megatron-core checkpoints with the logits of transformers."""

import json

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.numpy import load_file, save_file

from megatron_compress import cpu

cpu.apply()

from megatron_compress import strict_yaml  # noqa: E402
from megatron_compress.strict_yaml import ConfigError  # noqa: E402
from megatron_compress.training import checkpoint, distributed  # noqa: E402
from megatron_compress.training.config import ParallelConfig, load_experiment  # noqa: E402
from megatron_compress.training.data import load_corpus  # noqa: E402
from megatron_compress.training.importing import convert, reference  # noqa: E402
from megatron_compress.training.importing.source import read_source  # noqa: E402
from megatron_compress.training.loop import Trainer  # noqa: E402
from megatron_compress.training.model_config import ModelConfig  # noqa: E402
from tests.training.published import CONFIGS, LOGITS, TOKENS, write_folder, write_gguf  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.stand_alone()
    distributed.initialize(ParallelConfig())
    distributed.seed_everything(0)
    yield
    distributed.finalize()


def _import(source, out, tensor=1):
    """The largest difference between Megatron's logits and those of the reference, which are transformers' own."""
    logits = reference.logits(read_source(source), torch.tensor(TOKENS))[0, [5, -1], :4]
    torch.testing.assert_close(logits, torch.tensor(LOGITS[source.stem]), rtol=0, atol=2e-5)
    return convert.import_model(source, out, tensor)


@pytest.mark.parametrize("kind", CONFIGS)
def test_safetensors(tmp_path, kind):
    assert _import(write_folder(kind, tmp_path / kind), tmp_path / "out") < 2e-5
    assert checkpoint.latest(tmp_path / "out").name == "step_00000000"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gguf(tmp_path, kind):
    assert _import(write_gguf(kind, tmp_path / f"{kind}.gguf"), tmp_path / "out") < 2e-5


def test_heads_are_added_for_ranks_that_they_do_not_divide_by(tmp_path):
    assert _import(write_folder("qwen2", tmp_path / "qwen2"), tmp_path / "out", tensor=3) < 2e-5
    model = strict_yaml.load(tmp_path / "out/model.yaml", ModelConfig)
    assert (model.num_attention_heads, model.num_query_groups, model.head_dim) == (6, 3, 8)


def test_no_gradient_reaches_the_added_heads(tmp_path, write_files, train_values):
    """So they stay zero, and the model what it was, however long it is trained."""
    convert.import_model(write_folder("qwen2", tmp_path / "qwen2"), tmp_path / "out", 3)
    train_values |= {"init": "out", "parallel": {}, "arms": []}
    model = YAML(typ="safe").load(tmp_path / "out/model.yaml")
    (tmp_path / "digits.txt").write_text("".join(str(i * i) for i in range(1000)))  # bytes below 96
    trainer = Trainer(load_experiment(write_files(train_values, model)), load_corpus(tmp_path / "digits.txt", 0.1, 32))
    for step in (1, 2):
        trainer.step(step)
    seen = 0
    for name, parameter in trainer.chunks[0].named_parameters():
        for kind, dim in (("linear_qkv.weight", 0), ("linear_qkv.bias", 0), ("linear_proj.weight", 1)):
            if name.endswith(kind):
                seen += 1
                for tensor in (parameter, parameter.main_grad):
                    own, added = tensor.tensor_split([tensor.size(dim) * 2 // 3], dim)
                    assert own.any() and not added.any(), name
    assert seen == 6


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"model_type": "mamba"}, "holds a mamba model; known here: gpt2, llama"),
        ("llama", {"model_type": "mistral", "sliding_window": 4096}, "its use_sliding_window is True"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "its rotary embedding is 'yarn'"),
        ("llama3", {"rope_scaling": {**CONFIGS["llama3"]["rope_scaling"], "low_freq_factor": 2}}, "low_freq_factor is"),
        ("llama", {"hidden_act": "gelu"}, "its activation is 'gelu'; known here: 'silu'"),
        ("gpt2", {"activation_function": "relu"}, "its activation_function is 'relu'"),
        ("llama", {"num_hidden_layers": "2"}, "a model that is not known here"),
        ("qwen2", {"model_type": "llama"}, "no place for layers.0.self_attn.k_proj.bias, layers.0.self_attn.q_proj.b"),
        ("llama", {"model_type": "qwen2"}, "has no weight layers.0.self_attn.q_proj.bias"),
        ("llama", {"intermediate_size": 40}, r"linear_fc1.weight is \(96, 32\) there, \(80, 32\) in megatron-core"),
    ],
)
def test_other_models_are_refused(tmp_path, kind, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        convert.import_model(write_folder(kind, tmp_path / kind, **changes), tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_config_is_refused(tmp_path):
    folder = write_folder("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config.json: has no 'num_hidden_layers', which a llama model needs"):
        read_source(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: .*; give the folder of a model as Hugging Face has it"):
        read_source(folder)


def test_damaged_and_missing_files_are_named(tmp_path):
    folder = write_folder("llama", tmp_path / "llama")
    first, second = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"{first.name}: not a safetensors file, or damaged"):
        read_source(folder)
    first.unlink()
    with pytest.raises(ConfigError, match=r"has no weight embed_tokens\.weight"):
        convert.import_model(folder, tmp_path / "out", 1)
    second.rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \.safetensors file in it; pickled weights"):
        read_source(folder)
    file = write_gguf("llama", tmp_path / "llama.gguf")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"llama.gguf: not a GGUF file, or damaged"):
        read_source(file)


def test_what_old_files_repeat_does_no_harm(tmp_path):
    folder = write_folder("qwen2", tmp_path / "qwen2")
    file = sorted(folder.glob("*.safetensors"))[0]
    weights = load_file(file)
    weights |= {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = weights["model.embed_tokens.weight"][0, :4].copy()
    save_file(weights, file, metadata={"format": "pt"})
    assert _import(folder, tmp_path / "out") < 2e-5
