"""Text: microbatches are functions of their arguments, and held-out text is never trained on."""

import numpy as np
import pytest
import torch

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.data import held_out_microbatches, load_corpus, training_microbatch


@pytest.fixture
def corpus(text):
    return load_corpus(text, held_out_fraction=0.1, sequence_length=32)


def test_the_standard_library_is_the_default_text():
    corpus = load_corpus(None, 0.05, 128)
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(corpus.held_out) / len(corpus.train) < 0.2


def test_a_microbatch_depends_on_seed_step_and_index_alone(corpus):
    def draw(seed=1, step=2, index=3):
        return training_microbatch(corpus, seed, step, index, size=4, length=32)

    assert draw().shape == (4, 33) and draw().dtype == torch.int64
    assert torch.equal(draw(), draw())
    for other in (draw(seed=2), draw(step=3), draw(index=2)):
        assert not torch.equal(draw(), other)


def test_a_microbatch_is_text_in_order(corpus):
    window = bytes(training_microbatch(corpus, 1, 1, 0, size=1, length=32)[0].tolist())
    assert window in corpus.train.tobytes()


def test_documents_are_either_trained_on_or_held_out(corpus, text):
    train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
    documents = [path.read_bytes() for path in text.iterdir()]
    assert sum(document in train for document in documents) == 36
    assert sum(document in held_out for document in documents) == 4


def test_a_single_file_holds_out_its_end(text):
    file = text / "00.txt"
    corpus = load_corpus(file, 0.2, 16)
    assert np.concatenate([corpus.train, corpus.held_out]).tobytes() == file.read_bytes() + b"\0"


def test_held_out_windows_are_fixed_and_reach_both_ends(corpus):
    first, *_, last = held_out_microbatches(corpus, num_windows=8, size=2, length=32)
    assert first.shape == (2, 33)
    assert bytes(first[0].tolist()) == corpus.held_out[:33].tobytes()
    assert bytes(last[-1].tolist()) == corpus.held_out[-33:].tobytes()


def test_missing_or_short_text_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_corpus(tmp_path / "absent", 0.1, 32)
    with pytest.raises(ConfigError, match="too few"):
        load_corpus(text / "00.txt", 0.1, 4096)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_empty_text_is_refused(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"empty.*: [01] bytes are too few for one window of 32 \+ 1"):
        load_corpus(tmp_path / name, 0.1, 32)
