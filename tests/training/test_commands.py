"""The way of a published model as a user goes it: prepare text, import, check in a layout, train on, in processes."""

import json
import re

import pytest
from ruamel.yaml import YAML
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.training.published import CONFIGS, write_folder
from tests.training.start import PACKAGE, python, run, torchrun


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
    imported = tmp_path / "imported"
    said = _said(run(python(*PACKAGE, "import-model", "--source", source, "--out", imported)))
    assert float(re.search(r"its logits are those of .* to (\S+)", said)[1]) < 2e-5

    arguments = ["--text", text, "--tokenizer", imported / "tokenizer.json", "--out", tmp_path / "data/text"]
    said = _said(run(python(*PACKAGE, "prepare", *arguments)))
    assert f"wrote {tmp_path}/data/text.bin and {tmp_path}/data/text.idx: 40 documents, " in said
    facts = json.loads((tmp_path / "data/text.json").read_text())
    assert facts["documents"] == 40 and facts["tokens"] == 40 * (4 + 100 + 1)

    arguments = ["--config", config, "--source", source, "--out", tmp_path / "check"]
    said = _said(run(torchrun(2, *PACKAGE, "check-model", *arguments)))
    assert float(re.search(r"largest difference of a logit (\S+) ", said)[1]) < 2e-5
    assert re.search(r"held-out loss \d+\.\d{6} nats per token", said)
