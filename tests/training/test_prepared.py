"""Megatron's .bin/.idx: what `prepare` writes is blended and read in a fixed order; what does not fit is refused."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megatron_compress import cpu

cpu.apply()

from megatron_compress.strict_yaml import ConfigError  # noqa: E402
from megatron_compress.training import distributed  # noqa: E402
from megatron_compress.training.config import ArmConfig, ParallelConfig, load_experiment  # noqa: E402
from megatron_compress.training.loop import pretrain  # noqa: E402
from megatron_compress.training.prepared import load_blend, prepare  # noqa: E402
from megatron_compress.training.tokenizer import load_tokenizer  # noqa: E402

BYTES = load_tokenizer(None)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.stand_alone()
    distributed.initialize(ParallelConfig())
    yield
    distributed.finalize()


@pytest.fixture
def jsonl(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text("\n".join(json.dumps({"text": "wxyz " * 30 + str(i)}) for i in range(50)) + "\n")
    return file


@pytest.fixture
def tokenizer_file(tmp_path, text):
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    model.train([str(file) for file in text.iterdir()], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def experiment(write_files, train_values, model_values):
    def make(sources, model=None, **data):
        train_values.update(parallel={}, arms=[])
        train_values["data"] |= {"prepared": sources, **data}
        return load_experiment(write_files(train_values, {**model_values, **(model or {})}))

    return make


def test_a_blend_has_its_shares_and_its_order(experiment, text, jsonl, tmp_path):
    prepare(text, BYTES, tmp_path / "a")
    assert prepare(jsonl, BYTES, tmp_path / "b")["documents"] == 50
    config = experiment([{"path": "a", "weight": 3.0}, {"path": "b", "weight": 1.0}])
    blend = load_blend(config, BYTES, tmp_path / "cache")
    batches = [blend.microbatch(config.train, step, index) for step in range(1, 9) for index in range(4)]
    assert batches[0].shape == (2, 33) and batches[0].dtype == torch.int64
    windows = [bytes(window.tolist()) for batch in batches for window in batch]
    assert sum(b"wxyz" in window for window in windows) == 16  # of 64
    again = load_blend(config, BYTES, tmp_path / "another cache")
    assert torch.equal(again.microbatch(config.train, 5, 2), batches[4 * 4 + 2])
    assert len(again.held_out_microbatches(config.train)) == 2


def test_held_out_documents_are_not_trained_on(experiment, text, tmp_path):
    prepare(text, BYTES, tmp_path / "a")
    config = experiment([{"path": "a"}])
    blend = load_blend(config, BYTES, tmp_path / "cache")
    held_out, train = blend.held_out.indices, blend.train.indices
    assert len(held_out) == 2 and not set(held_out.tolist()) & set(train.tolist())


def test_training_on_a_tokenizers_file(experiment, text, tokenizer_file, tmp_path):
    tokenizer = load_tokenizer(tokenizer_file)
    facts = prepare(text, tokenizer, tmp_path / "a")
    assert facts["tokens"] < sum(file.stat().st_size for file in text.iterdir())
    config = experiment([{"path": "a"}], {"vocab_size": 300}, tokenizer="tokenizer.json")
    result = pretrain(
        config, load_blend(config, tokenizer, tmp_path / "cache"), ArmConfig(name="train"), tmp_path, False
    )
    assert result.steps[-1].loss < result.steps[0].loss


def test_another_tokenizer_is_refused(experiment, text, tokenizer_file, tmp_path):
    prepare(text, load_tokenizer(tokenizer_file), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"prepared with the tokenizer tokenizer.json, but data.tokenizer is bytes"):
        load_blend(experiment([{"path": "a"}]), BYTES, tmp_path / "cache")
    (tmp_path / "a.json").unlink()
    with pytest.raises(ConfigError, match=r"holds token \d+, but the model's vocab_size is 256"):
        load_blend(experiment([{"path": "a"}]), BYTES, tmp_path / "cache")


def test_damaged_data_is_refused(experiment, text, tmp_path):
    prepare(text, BYTES, tmp_path / "a")
    config = experiment([{"path": "a"}])
    content = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"a.bin: has \d+ bytes where its index has"):
        load_blend(config, BYTES, tmp_path / "cache")
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(ConfigError, match=r"a.idx: damaged, or not an index"):
        load_blend(config, BYTES, tmp_path / "cache")
    (tmp_path / "a.idx").unlink()
    with pytest.raises(ConfigError, match=r"a.idx: no such file"):
        load_blend(config, BYTES, tmp_path / "cache")


def test_too_little_data_is_refused(experiment, jsonl, tmp_path):
    jsonl.write_text('{"text": "short"}\n')
    prepare(jsonl, BYTES, tmp_path / "a")
    with pytest.raises(ConfigError, match="too little: of its 1 documents none would be held out"):
        load_blend(experiment([{"path": "a"}]), BYTES, tmp_path / "cache")


@pytest.mark.parametrize(
    ("line", "reason"), [("{", "other.jsonl:1: not JSON"), ('{"txt": "a"}', 'other.jsonl:1: no string "text"')]
)
def test_wrong_lines_are_named_and_nothing_is_left(jsonl, tmp_path, line, reason):
    jsonl.write_text(line + "\n")
    with pytest.raises(ConfigError, match=reason):
        prepare(jsonl, BYTES, tmp_path / "a")
    assert not list(tmp_path.glob("a.*"))


def test_empty_text_is_refused(jsonl, tmp_path):
    jsonl.write_text("")
    with pytest.raises(ConfigError, match="there is no text in it; nothing was written"):
        prepare(jsonl, BYTES, tmp_path / "a")
    assert not list(tmp_path.glob("a.*"))


@pytest.mark.parametrize(
    ("content", "reason"), [("{}", "not a file of the `tokenizers` library"), (None, "cannot be read")]
)
def test_what_is_no_tokenizer_is_refused(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer(tmp_path / "t.json")


def test_a_missing_end_token_is_refused(tokenizer_file):
    with pytest.raises(ConfigError, match=r"has no token <end> to end documents with; name one in data.end_token"):
        load_tokenizer(tokenizer_file, "<end>")
