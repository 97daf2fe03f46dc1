"""Training files: what is shipped loads, and each mistake is refused with its reason."""

from pathlib import Path

import pytest

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.config import load_experiment, num_microbatches

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted((CONFIGS / "train").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load_and_name_files_that_exist(path):
    experiment = load_experiment(path)
    files = [experiment.compress_file(arm) for arm in experiment.train.arms]
    assert all(file is None or file.is_file() for file in files)


def test_relative_paths_start_at_the_training_file(write_files, train_values, model_values):
    train_values["arms"].append({"name": "small", "compress": "sub/small.yaml"})
    path = write_files(train_values, model_values)
    experiment = load_experiment(path)
    assert experiment.compress_file(experiment.train.arms[-1]) == path.parent / "sub/small.yaml"


@pytest.mark.parametrize(
    ("section", "key", "value", "reason"),
    [
        ("run", "step", 3, "steps"),
        ("optimizer", "warmup_steps", 8, "run.steps is 8, but optimizer.warmup_steps alone is 8"),
        ("parallel", "pipeline", 4, "num_layers is 2, which is not a multiple of"),
        ("parallel", "virtual_pipeline", 3, "num_layers is 2, which is not a multiple of"),
        ("data", "held_out_fraction", 0.7, "less than 0.5"),
    ],
)
def test_mistakes_are_refused(write_files, train_values, model_values, section, key, value, reason):
    train_values[section][key] = value
    with pytest.raises(ConfigError, match=reason):
        load_experiment(write_files(train_values, model_values))


@pytest.mark.parametrize(
    ("arms", "reason"),
    [
        ([{"name": "a"}, {"name": "a"}], "two arms are named 'a'"),
        ([{"name": "a"}, {"name": "b", "equals": "c"}], "equals 'c', which is no earlier arm"),
        ([{"name": "a", "compress": "x.yaml"}], "the first arm"),
        ([{"name": "a", "steps": 9}], "has 9 steps, but the schedule ends at 8"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(write_files, train_values, model_values, arms, reason):
    train_values["arms"] = arms
    with pytest.raises(ConfigError, match=reason):
        load_experiment(write_files(train_values, model_values))


def test_number_of_microbatches(write_files, train_values, model_values):
    train = load_experiment(write_files(train_values, model_values)).train
    assert num_microbatches(train, data_parallel_size=2) == 2
    with pytest.raises(ConfigError, match="global_batch_size is 8"):
        num_microbatches(train, data_parallel_size=3)


def test_another_length_keeps_the_shape_of_the_schedule(write_files, train_values, model_values):
    train = load_experiment(write_files(train_values, model_values)).with_steps(20).train
    assert (train.run.steps, train.optimizer.warmup_steps) == (20, 5)
