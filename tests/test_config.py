"""The compression configuration: flat rules, errors, defaults, digest, description."""

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from megatron_compress import registry
from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.config import AXES, DIRECTIONS, CompressionConfig, PipelineRule, TensorRule
from megatron_compress.strict_yaml import ConfigError

CONFIG_FOLDER = Path(__file__).parents[1] / "configs" / "compress"
CONFIGS = sorted(CONFIG_FOLDER.glob("*.yaml"))


class ToySettings(Settings):
    group_size: int = Field(default=64, ge=32, le=512)
    grid: Literal["even", "log"] = "even"
    clip: float = 2.0
    pairs: bool = False

    @model_validator(mode="after")
    def _pairs_need_even(self):
        if self.pairs and self.grid != "even":
            raise ValueError("pairs needs grid: even; set it")
        return self


class Toy(Compressor):
    """A compressor with a setting of every kind; it is never run."""

    name = "toy"
    Settings = ToySettings

    def refuse_axis(self, axis):
        too_large = axis == "tensor" and self.settings.group_size == 512
        return "its groups of 512 do not fit; set group_size: 256" if too_large else None

    def layout(self, spec):
        raise NotImplementedError

    encode = decode = layout


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    registry.names()
    monkeypatch.setitem(registry._CLASSES, "toy", Toy)


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> CompressionConfig:
        path = tmp_path / "compress.yaml"
        path.write_text(text)
        return CompressionConfig.load(path)

    return read


@pytest.fixture
def problems(read, tmp_path):
    """The lines of the error that a text gives, without the folder."""

    def problems(text: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text)
        return str(error.value).replace(f"{tmp_path}/", "").splitlines()

    return problems


def test_a_rule_is_split_into_compressor_and_keys(read):
    config = read(
        "pipeline:\n  backward: {compressor: toy, group_size: 32, clip: 3, min_bytes: 8, exempt_stages: [2, 0, 2]}\n"
        "tensor:\n  forward: {compressor: toy, first_step: 5, exempt_sites: [mlp, head], algorithm: two_shot}\n"
    )
    rule = config.rule("pipeline", "backward")
    assert isinstance(rule.compressor, Toy)
    assert rule.compressor.settings == ToySettings(group_size=32, clip=3.0)
    assert (rule.min_bytes, rule.first_step, rule.exempt_stages) == (8, 0, (0, 2))
    rule = config.rule("tensor", "forward")
    assert (rule.first_step, rule.exempt_sites, rule.algorithm) == (5, ("head", "mlp"), "two_shot")


def test_defaults(read):
    config = read("tensor: {backward: {compressor: toy}}")
    rule = config.rule("tensor", "backward")
    assert rule.compressor.settings == ToySettings()
    assert (rule.min_bytes, rule.first_step, rule.exempt_stages) == (0, 0, ())
    assert (rule.exempt_sites, rule.algorithm) == (("embedding", "head"), "auto")
    assert [(axis, direction) for axis, direction, rule in config.rules() if rule] == [("tensor", "backward")]


@pytest.mark.parametrize("name", registry.names())
def test_every_registered_compressor_serves_the_pipeline_with_its_defaults(read, name):
    for direction in DIRECTIONS[:1] if registry.get(name).remembers else DIRECTIONS:
        config = read(f"pipeline: {{{direction}: {{compressor: {name}}}}}")
        assert config.rule("pipeline", direction).compressor.name == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pipelin: {}", ["1: pipelin: unknown key; nearest is 'pipeline'; valid keys here: pipeline, tensor"]),
        (
            "pipeline:\n  foward: {}",
            ["2: pipeline.foward: unknown key; nearest is 'forward'; valid keys here: forward, "],
        ),
        ("pipeline:\n", ["1: pipeline: must be a mapping"]),
        ("pipeline:\n  forward:\n", ["2: pipeline.forward: has no value; give it `compressor: NAME`, or remove"]),
        ("pipeline:\n  forward: toy\n", ["2: pipeline.forward: must be a mapping (lines of `key: value`), got 'toy'"]),
        (
            "pipeline:\n  forward:\n    bits: 3",
            ["2: pipeline.forward.compressor: this key is missing; add the name of a compressor, registered: "],
        ),
        ("pipeline:\n  forward: {compressor: [toy]}", ["2: pipeline.forward.compressor: must be the name of a"]),
        (
            "pipeline:\n  forward:\n    compressor: toyy",
            ["3: pipeline.forward.compressor: unknown compressor 'toyy'; nearest is 'toy'; registered: "],
        ),
        (
            "pipeline:\n  forward:\n    compressor: toy\n"
            "    group_siz: 3\n    min_byte: 2\n    clip: x\n    grid: lgo\n",
            [
                "4: pipeline.forward.group_siz: unknown key; nearest is 'group_size'; valid keys here: ",
                "5: pipeline.forward.min_byte: unknown key; nearest is 'min_bytes'; valid keys here: ",
                "6: pipeline.forward.clip: must be a valid number, got 'x'",
                "7: pipeline.forward.grid: must be 'even' or 'log', got 'lgo'; nearest is 'log'",
            ],
        ),
        (
            "pipeline:\n  forward: {compressor: toy, group_size: 31}\n"
            "  backward:\n    compressor: toy\n    min_bytes: -1\n",
            [
                "2: pipeline.forward.group_size: must be greater than or equal to 32, got 31",
                "5: pipeline.backward.min_bytes: must be greater than or equal to 0, got -1",
            ],
        ),
        (
            "pipeline:\n  forward:\n    compressor: toy\n    exempt_sites: [mlp]\n    algorithm: auto\n",
            [
                "4: pipeline.forward.exempt_sites: not a key here: a pipeline message leaves a whole stage",
                "5: pipeline.forward.algorithm: not a key here: a pipeline message goes to one rank",
            ],
        ),
        (
            "tensor:\n  forward: {compressor: toy, exempt_sites: [atention], algorithm: two-shot, exempt_stages: [-1]}",
            [
                "2: tensor.forward.algorithm: must be 'auto', 'one_shot' or 'two_shot', got 'two-shot'; nearest is ",
                "2: tensor.forward.exempt_sites[0]: must be 'embedding', 'head', 'attention' or 'mlp', got "
                "'atention'; nearest is 'attention'",
                "2: tensor.forward.exempt_stages[0]: must be greater than or equal to 0, got -1",
            ],
        ),
        (
            "tensor:\n  forward:\n    group_size: 512\n    compressor: toy",
            ["4: tensor.forward.compressor: toy cannot serve the tensor axis: its groups of 512 do not fit; set gr"],
        ),
        (
            "tensor:\n  forward: {compressor: toy, pairs: true, grid: log}",
            ["2: tensor.forward: pairs needs grid: even; set it"],
        ),
        ("{}", ["1: nothing is compressed: there is no rule; add one, as in"]),
        ("tensor: {}\npipeline: {}", ["1: nothing is compressed"]),
    ],
)
def test_errors_say_line_place_and_remedy(problems, text, expected):
    found = problems(text)
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(f"compress.yaml:{start}")


RULE_KEYS = sorted({*ToySettings.model_fields, *TensorRule.model_fields} - {"compressor"})


@st.composite
def _misspelt(draw):
    """A key of a tensor rule and the same with one typing error: a letter lost, added, replaced or exchanged."""
    key = draw(st.sampled_from(RULE_KEYS))
    at = draw(st.integers(0, len(key) - 2))
    letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    before, here, after, rest = key[:at], key[at], key[at + 1], key[at + 2 :]
    lost, added = before + after + rest, before + letter + here + after + rest
    replaced, exchanged = before + letter + after + rest, before + after + here + rest
    wrong = draw(st.sampled_from([lost, added, replaced, exchanged]))
    assume(wrong not in RULE_KEYS)
    return key, wrong


@given(_misspelt())
def test_a_misspelt_key_names_the_right_one(keys):
    right, wrong = keys
    with pytest.raises(ValidationError, match=f"unknown key; nearest is '{right}'"):
        TensorRule(compressor="toy", **{wrong: 1})


def test_settings_that_hide_a_rule_key_are_a_mistake_of_the_compressor(monkeypatch):
    class Clash(Toy):
        class Settings(Settings):
            min_bytes: int = 3

    monkeypatch.setitem(registry._CLASSES, "clash", Clash)
    with pytest.raises(TypeError, match=r"must not use the rule's keys \['min_bytes'\]"):
        PipelineRule(compressor="clash")


def test_rules_can_be_built_in_python():
    flat = PipelineRule(compressor="toy", group_size=32, min_bytes=8)
    built = PipelineRule(compressor=Toy(ToySettings(group_size=32)), min_bytes=8)
    assert flat.canonical() == built.canonical()
    assert CompressionConfig(pipeline={"forward": flat}).rule("pipeline", "forward") is flat


SAME = [
    "pipeline: {forward: {compressor: toy, clip: 2}}",
    "# a comment\npipeline:\n  forward:\n    clip: 2.0\n    compressor: 'toy'\n",
    "pipeline: {forward: {compressor: toy, group_size: 64, min_bytes: 0, exempt_stages: []}}\ntensor: {}",
]
DIFFERENT = [
    "pipeline: {backward: {compressor: toy}}",
    "tensor: {forward: {compressor: toy}}",
    "pipeline: {forward: {compressor: identity}}",
    "pipeline: {forward: {compressor: toy, clip: .inf}}",
    "pipeline: {forward: {compressor: toy, min_bytes: 1}}",
    "pipeline: {forward: {compressor: toy, first_step: 1}}",
    "pipeline: {forward: {compressor: toy, exempt_stages: [1]}}",
    "tensor: {forward: {compressor: toy, exempt_sites: []}}",
    "tensor: {forward: {compressor: toy, algorithm: one_shot}}",
]


def test_digest_is_equal_for_equal_meaning_only(read):
    (digest,) = {read(text).digest() for text in SAME}
    assert len(bytes.fromhex(digest)) == 32
    assert len({digest, *(read(text).digest() for text in DIFFERENT)}) == 1 + len(DIFFERENT)


def test_digest_does_not_depend_on_the_order_of_sets(read):
    text = "tensor: {{forward: {{compressor: toy, exempt_sites: {}, exempt_stages: {}}}}}"
    assert read(text.format("[mlp, head]", "[10, 9]")).digest() == read(text.format("[head, mlp]", "[9, 10]")).digest()


def test_describe_says_every_axis_and_direction_and_what_stays_plain(read):
    config = read(
        "pipeline: {backward: {compressor: toy}}\n"
        "tensor: {forward: {compressor: toy, min_bytes: 4096, first_step: 100, exempt_stages: [0, 3]}}\n"
    )
    toy = "toy(group_size=64, grid=even, clip=2.0, pairs=False)"
    assert config.describe() == [
        "pipeline forward → plain",
        f"pipeline backward → {toy}",
        f"tensor forward → {toy}; plain: tensors below 4096 bytes, steps before 100, stages 0 3, sites embedding head",
        "tensor backward → plain",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    config = CompressionConfig.load(path)
    assert len(config.describe()) == len(AXES) * len(DIRECTIONS) + (config.linear is not None)


def test_linear_layers_alone_are_a_configuration(read):
    config, other = (read(f"linear: {{method: halo, level: {level}, format: fp8}}") for level in (0, 2))
    assert config.digest() != other.digest()
    assert other.describe()[-1] == "linear → halo-2 fp8"


def test_shipped_identity_leaves_nothing_plain():
    config = CompressionConfig.load(CONFIG_FOLDER / "identity.yaml")
    assert {rule.compressor.name for _, _, rule in config.rules()} == {"identity"}
    assert not any("plain" in line for line in config.describe())


def test_token_allocation_is_refused_where_chunks_have_no_tokens():
    rule = {"forward": {"compressor": "tah_quant", "allocation_size": "token"}}
    CompressionConfig(pipeline=rule)
    with pytest.raises(ValueError, match="flat chunks, which have no tokens"):
        CompressionConfig(tensor=rule)
