"""Damaged, incomplete, foreign and dangerous checkpoints are refused by name; a full disk loses nothing."""

import json
import pickle
import resource
import shutil
from dataclasses import replace

import pytest
import torch

from megatron_compress import cpu

cpu.apply()

from megatron.core.dist_checkpointing.core import CheckpointingConfig  # noqa: E402

from megatron_compress.training import checkpoint, distributed, state  # noqa: E402
from megatron_compress.training.checkpoint import CheckpointError  # noqa: E402
from megatron_compress.training.config import ArmConfig, ParallelConfig, load_experiment  # noqa: E402
from megatron_compress.training.data import load_corpus  # noqa: E402
from megatron_compress.training.loop import Trainer, pretrain  # noqa: E402

ARM = ArmConfig(name="train")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.stand_alone()
    distributed.initialize(ParallelConfig())
    yield
    distributed.finalize()


@pytest.fixture
def experiment(write_files, train_values, model_values):
    train_values.update(parallel={}, arms=[])
    train_values["run"] |= {"save_every": 4}
    return load_experiment(write_files(train_values, model_values))


@pytest.fixture
def corpus(text):
    return load_corpus(text, 0.1, 32)


@pytest.fixture
def out(experiment, corpus, tmp_path):
    """A finished run with two checkpoints."""
    pretrain(experiment, corpus, ARM, tmp_path / "out", resume=False)
    return tmp_path / "out"


def _newest(out):
    return checkpoint.latest(out / "checkpoints")


def _remade_manifest(path):
    """As someone would who wants a changed file to be read."""
    (path / "manifest.json").unlink()
    checkpoint._write_manifest(path)


def test_a_second_run_does_not_overwrite_the_first(experiment, corpus, out):
    with pytest.raises(CheckpointError, match="add --resume to go on, or give another --out"):
        pretrain(experiment, corpus, ARM, out, resume=False)


def test_checkpoints_can_be_read_in_megatrons_own_way(out):
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(_newest(out)))
    assert tensors["embedding.word_embeddings.weight"].shape == (256, 64)


@pytest.mark.parametrize("file", ["__0_0.distcp", "metadata.json", ".metadata"])
def test_a_damaged_file_is_named(experiment, corpus, out, file):
    path = _newest(out) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}: damaged .*\n.*whole ones here: step_00000004"):
        pretrain(experiment, corpus, ARM, out, resume=True)
    (out / "checkpoints/latest").write_text("step_00000004\n")
    assert len(pretrain(experiment, corpus, ARM, out, resume=True).steps) == 8


@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_a_missing_file_is_named(experiment, corpus, out, file):
    (_newest(out) / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}.*(missing|No such file)"):
        pretrain(experiment, corpus, ARM, out, resume=True)


def test_a_shortened_file_is_named(experiment, corpus, out):
    with (_newest(out) / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="1000 bytes where"):
        pretrain(experiment, corpus, ARM, out, resume=True)


def test_a_pointer_to_nowhere_is_named(experiment, corpus, out):
    (out / "checkpoints/latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./etc', which is no checkpoint here"):
        pretrain(experiment, corpus, ARM, out, resume=True)


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_nothing_in_a_checkpoint_can_run(experiment, corpus, out, tmp_path, monkeypatch, file):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # not even for a user who has set this
    proof = tmp_path / "it ran"
    path = _newest(out) / file
    if file == ".metadata":
        path.write_bytes(pickle.dumps(_Evil(proof)))
    else:
        torch.save({"step": _Evil(proof)}, path)
    _remade_manifest(path.parent)
    with pytest.raises(CheckpointError, match=r"refers to io.open|_io.open|neither a tensor nor a plain value"):
        pretrain(experiment, corpus, ARM, out, resume=True)
    assert not proof.exists()


def test_an_evil_object_among_the_ranks_states_cannot_run(experiment, corpus, out, tmp_path, monkeypatch):
    proof = tmp_path / "it ran"
    monkeypatch.setattr(state, "_rank_state", lambda: {"cpu": _Evil(proof)})
    trainer = Trainer(experiment, corpus)
    trainer.step(1)
    shutil.rmtree(out / "checkpoints")
    state.save(trainer, 4, out / "checkpoints", 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="neither a tensor nor a plain value"):
        state.load(trainer, _newest(out))
    assert not proof.exists()


@pytest.mark.skipif(
    not hasattr(CheckpointingConfig, "common_backend"), reason="this release reads its own and older ones"
)
def test_a_checkpoint_of_a_later_megatron_is_refused(experiment, corpus, out):
    """megatron-core 0.19.2 writes no common.pt."""
    (_newest(out) / "common.pt").unlink()
    _remade_manifest(_newest(out))
    with pytest.raises(
        CheckpointError, match=r"written by a later release of megatron-core, .* go on with that release"
    ):
        pretrain(experiment, corpus, ARM, out, resume=True)


def test_another_model_is_refused(experiment, corpus, out, write_files, train_values, model_values):
    other = load_experiment(write_files(train_values, {**model_values, "ffn_hidden_size": 64}))
    with pytest.raises(CheckpointError, match=r"of another run: model.ffn_hidden_size: 128 there, 64 here"):
        pretrain(other, corpus, ARM, out, resume=True)


def test_another_tokenizer_is_refused(experiment, corpus, out):
    other = replace(corpus, tokenizer=replace(corpus.tokenizer, digest="of another file"))
    with pytest.raises(CheckpointError, match=r"of another run: its tokenizer is another file than data\.tokenizer"):
        pretrain(experiment, other, ARM, out, resume=True)


def test_first_weights_that_are_not_there_are_named(experiment, corpus, write_files, train_values, model_values, out):
    other = load_experiment(write_files({**train_values, "init": "absent"}, model_values))
    with pytest.raises(CheckpointError, match=r"absent/manifest\.json: FileNotFoundError"):
        Trainer(other, corpus)
    wider = {**model_values, "hidden_size": 128}
    other = load_experiment(write_files({**train_values, "init": "out/checkpoints"}, wider))
    with pytest.raises(CheckpointError, match=r"step_00000008 does not fit this model"):
        Trainer(other, corpus)


def test_another_kind_of_optimizer_is_refused(corpus, out, write_files, train_values, model_values):
    other = load_experiment(write_files({**train_values, "parallel": {"distributed_optimizer": True}}, model_values))
    with pytest.raises(CheckpointError, match=r"was saved with parallel.distributed_optimizer: False, but it is True"):
        pretrain(other, corpus, ARM, out, resume=True)


def test_a_full_disk_loses_nothing(experiment, corpus, out):
    """The limit on a file's size stands for it: the write fails in the middle of the tensors."""
    trainer = Trainer(experiment, corpus)
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"could not be written: OSError: .*File too large; .*step_00000008 is"
        ):
            state.save(trainer, 9, out / "checkpoints", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before
    assert state.load(trainer, _newest(out))[0] == 8


def test_old_checkpoints_go_and_tensorboard_has_the_run(out):
    assert [path.name for path in checkpoint.steps_in(out / "checkpoints")] == ["step_00000004", "step_00000008"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [event.step for event in events.Scalars("loss")] == [line["step"] for line in lines if "loss" in line]
