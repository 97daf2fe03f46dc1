"""The way of a published model as a user goes it: prepare text, import, check in a layout, train on, in processes."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from ruamel.yaml import YAML
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_compress import cpu

cpu.apply()

from megatron_compress.strict_yaml import ConfigError  # noqa: E402
from megatron_compress.training import commands  # noqa: E402
from megatron_compress.training.config import load_experiment  # noqa: E402
from tests.training.published import CONFIGS, write_folder  # noqa: E402
from tests.training.start import PACKAGE, python, run, torchrun  # noqa: E402


@pytest.fixture
def source(tmp_path):
    """A small LLaMA with a tokenizer of a few words."""
    words = ["<|endoftext|>", "document", "counts", ":", *map(str, range(CONFIGS["llama"]["vocab_size"] - 5)), "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = write_folder("llama", tmp_path / "source")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def config(tmp_path, train_values):
    train_values |= {"model": "imported/model.yaml", "init": "imported", "parallel": {"pipeline": 2}, "arms": []}
    train_values["data"] |= {"tokenizer": "imported/tokenizer.json", "prepared": [{"path": "data/text"}]}
    YAML().dump(train_values, tmp_path / "train.yaml")
    return tmp_path / "train.yaml"


def _said(done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prepare_import_and_check(text, source, config, tmp_path):
    imported, data = tmp_path / "imported", tmp_path / "data/text"
    starts = [
        ["import-model", "--source", source, "--out", imported],
        ["prepare", "--text", text, "--tokenizer", source / "tokenizer.json", "--out", data],
    ]
    with ThreadPoolExecutor() as pool:
        said = [_said(done) for done in pool.map(lambda start: run(python(*PACKAGE, *start)), starts)]
    assert float(re.search(r"its logits are those of .* to (\S+)", said[0])[1]) < 2e-5
    assert f"wrote {data}.bin and {data}.idx: 40 documents, " in said[1]
    facts = json.loads((tmp_path / "data/text.json").read_text())
    assert facts["documents"] == 40 and facts["tokens"] == 40 * (4 + 100 + 1)

    arguments = ["--config", config, "--source", source, "--out", tmp_path / "check"]
    said = _said(run(torchrun(2, *PACKAGE, "check-model", *arguments)))
    assert float(re.search(r"largest difference of a logit (\S+) ", said)[1]) < 2e-5
    assert re.search(r"held-out loss \d+\.\d{6} nats per token", said)


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "reason"),
    [
        (96, None, "the tokenizer bytes has 256 tokens, but the model's vocab_size is 96; give the model's own"),
        (256, None, "data.tokenizer is bytes, but the model of `init` was imported with .*source/tokenizer.json"),
        (256, "other.json", "data.tokenizer is other.json, but the model of `init` was imported with"),
        (256, "source/tokenizer.json", "no such file, and no folder with files in it"),  # the text; it has come so far
    ],
)
def test_another_tokenizer_than_the_models_is_refused(
    source, write_files, train_values, model_values, tmp_path, vocab_size, tokenizer, reason
):
    (tmp_path / "other.json").write_text((source / "tokenizer.json").read_text() + "\n")
    train_values |= {"init": "source", "parallel": {}, "arms": []}
    train_values["data"]["tokenizer"] = tokenizer
    experiment = load_experiment(write_files(train_values, {**model_values, "vocab_size": vocab_size}))
    with pytest.raises(ConfigError, match=reason):
        commands.train(experiment, tmp_path / "out", None, tmp_path / "absent", False)
