"""Strict YAML: what loads, and what every error says."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from megatron_compress.strict_model import StrictModel
from megatron_compress.strict_yaml import ConfigError, load


class Optimizer(StrictModel):
    kind: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: int | Literal["constant"] = "constant"


class Run(StrictModel):
    name: str
    optimizer: Optimizer = Optimizer()
    layers: Annotated[tuple[int, ...], Field(strict=False)] = ()
    stages: tuple[Optimizer, ...] = Field(default=(), strict=False)
    resume: bool = False


@pytest.fixture
def read(tmp_path):
    def read(text: str | bytes, model=Run):
        path = tmp_path / "run.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load(path, model)

    return read


@pytest.fixture
def problems(read, tmp_path):
    """The lines of the error that a text gives, without the folder."""

    def problems(text: str | bytes) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text)
        return str(error.value).replace(f"{tmp_path}/", "").splitlines()

    return problems


@pytest.mark.parametrize("prefix", ["", "# a comment\n", "---\n", "\ufeff", "%YAML 1.2\n---\n"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_loads_a_mapping(read, prefix, newline):
    text = prefix + "name: first\noptimizer: {kind: sgd, learning_rate: 1e-2}\nlayers: [1, 2]\nresume: true\n"
    run = read(text.replace("\n", newline))
    assert run == Run(name="first", optimizer=Optimizer(kind="sgd", learning_rate=0.01), layers=(1, 2), resume=True)


def test_whole_numbers_are_floats_too(read):
    assert read("name: a\noptimizer: {learning_rate: 1}").optimizer.learning_rate == 1.0


def test_aliases_and_merge_keys(read):
    run = read(
        "name: a\n"
        "optimizer: &base {kind: sgd, learning_rate: 2.0}\n"
        "stages:\n"
        "  - *base\n"
        "  - {<<: *base, learning_rate: 3.0}\n"
        "  - {<<: [{kind: adam}, *base]}\n"
    )
    assert [(stage.kind, stage.learning_rate) for stage in run.stages] == [("sgd", 2.0), ("sgd", 3.0), ("adam", 2.0)]


@pytest.mark.parametrize("version", ["", "%YAML 1.1\n---\n", "%YAML 1.2\n---\n"])
@pytest.mark.parametrize("word", ["yes", "no", "on", "off"])
def test_yaml_1_2_words_are_text(read, version, word):
    assert read(f"{version}name: {word}").name == word


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nme: a\n", ["1: name: this key is missing; add it", "1: nme: unknown key; nearest is 'name'; valid keys"]),
        ("name: a\noptimizer:\n\n  knd: sgd\n", ["4: optimizer.knd: unknown key; nearest is 'kind'; valid keys here:"]),
        ("name: a\nxyzzy: 1\n", ["2: xyzzy: unknown key; valid keys here: name, optimizer, layers, stages, resume"]),
        ("name: 3\n", ["1: name: must be a valid string, got 3"]),
        ("name:\n", ["1: name: must be a valid string, got nothing"]),
        ("name: a\nresume: 'true'\n", ["2: resume: must be a valid boolean, got 'true'"]),
        ("name: a\nlayers: 3\n", ["2: layers: must be a valid list, got 3"]),
        ("name: a\nlayers:\n  - 1\n  - '2'\n", ["4: layers[1]: must be a valid integer, got '2'; remove the quotes"]),
        ("name: a\nlayers: [true]\n", ["2: layers[0]: must be a valid integer, got true"]),
        ("name: a\noptimizer: [1]\n", ["2: optimizer: must be a mapping (lines of `key: value`), got a list"]),
        ("name: a\noptimizer: {learning_rate: 0}\n", ["2: optimizer.learning_rate: must be greater than 0, got 0"]),
        ("name: a\noptimizer: {kind: adm}\n", ["2: optimizer.kind: must be 'adam' or 'sgd', got 'adm'; nearest is"]),
        ("name: a\noptimizer: {schedule: constnt}", ["2: optimizer.schedule: must be a valid integer or 'constant', "]),
        ("name: a\nstages:\n  - kind: sgd\n  - {knd: 1}", ["4: stages[1].knd: unknown key; nearest is 'kind'"]),
    ],
)
def test_values_that_do_not_fit(problems, text, expected):
    found = problems(text)
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(f"run.yaml:{start}")


def test_all_problems_are_told_in_order_of_lines(problems):
    found = problems("nam: a\noptimizer:\n  kind: 3\n  learning_rate: fast\nlayers: {}\n")
    assert [line.split(":")[1] for line in found] == ["1", "1", "3", "4", "5"]


def test_an_error_in_a_merged_key_names_the_line_it_was_written_on(problems):
    assert problems("name: a\noptimizer: &base\n  kind: sgd\nstages:\n  - <<: *base\n    learn_rate: 1\n") == [
        "run.yaml:6: stages[0].learn_rate: unknown key; nearest is 'learning_rate'; valid keys here: "
        "kind, learning_rate, schedule"
    ]
    assert problems("name: a\nstages:\n  - &base\n    kind: 3\n  - <<: *base\n")[1].startswith(
        "run.yaml:4: stages[1].kind:"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: the file is empty; write some of the keys name, optimizer"),
        ("# only a comment\n", "1: the file is empty"),
        ("just text\n", "1: must be a mapping (lines of `key: value`), got 'just text'"),
        ("- name\n", "1: must be a mapping (lines of `key: value`), got a list"),
        ("name: a\noptimizer:\n\tkind: sgd\n", "3: a tab where YAML wants spaces; indent with spaces"),
        (
            "name: a\nlayers: [1, 2\n",
            "3: not valid YAML: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence that "
            "starts on line 2)",
        ),
        ("name: a: b\n", "1: a second `: ` in one line; write one key a line"),
        ("name: *nobody\n", "1: not valid YAML: found undefined alias 'nobody'"),
        ("name: a\n---\nname: b\n", "2: a second document starts here; keep one document a file"),
        ("name: a\nresume: true\nname: b\n", "3: key 'name' is already set on line 1; keep one of the two"),
        ('name: a\n"two\\nlines": b\n', "2: two lines: unknown key; valid keys here: name, "),
        ("name: a\n3: b\n", "2: key '3' is not text; write a name, or put it in quotes"),
        ("name: a\n[b, c]: d\n", "2: key made of several values is not text"),
        ("name: a\n<<: 3\n", "2: << merges a mapping or a list of mappings"),
        ("name: 2001-02-03\n", "1: 2001-02-03 is a date; put it in quotes to make it text"),
        ("name: a\nlayers: [!!int six]\n", "2: 'six' is no int; remove the tag"),
        ("name: a\nresume: !!bool maybe\n", "2: 'maybe' is no bool; remove the tag"),
        ("name: a\nlayers: &loop [*loop]\n", "1: nested too deeply, or an alias contains itself"),
        ("name: &loop {<<: *loop}\n", "1: nested too deeply, or an alias contains itself"),
        ("name: " + "[" * 1000, "1: nested too deeply, or an alias contains itself"),
        ("name: a\n\nlayers: \x01\n", "3: not YAML: unacceptable character #x0001"),
        (b"name: a\nlayers: \xff\n", "2: not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_text_that_is_no_mapping_of_plain_values(problems, text, expected):
    (line,) = problems(text)
    assert line.startswith(f"run.yaml:{expected}")


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.getcwd []", "!!python/name:os.getcwd", "!thing {}", "!!set {a}"]
)
def test_no_tag_constructs_anything(problems, value):
    (line,) = problems(f"name: a\nlayers: {value}\n")
    assert line.startswith("run.yaml:2: tag ")
    assert line.endswith("only plain values are read; remove the tag")


def test_aliases_that_multiply_are_refused(problems):
    levels = [f"k{level}: &k{level} [{', '.join([f'*k{level - 1}'] * 10)}]" for level in range(1, 9)]
    (line,) = problems("\n".join(["k0: &k0 [x]", *levels]))
    assert "more than 10000 values with aliases written out; use fewer of them" in line


def test_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "mixed.yaml").touch()
    with pytest.raises(ConfigError, match=r"mixd\.yaml: no such file; nearest is 'mixed\.yaml'"):
        load(tmp_path / "mixd.yaml", Run)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path, Run)


@given(st.text(max_size=80))
def test_any_text_loads_or_is_a_config_error(tmp_path_factory, text):
    _loads_or_is_a_config_error(tmp_path_factory, text.encode(errors="surrogatepass"))


@given(
    st.lists(
        st.sampled_from([*"{}[]:,-?&*!|>'\"#%@ \n\t", "name", "a", "1", "<<", "---", "&a ", "*a", ": "]), max_size=30
    )
)
def test_any_yaml_like_text_loads_or_is_a_config_error(tmp_path_factory, parts):
    _loads_or_is_a_config_error(tmp_path_factory, "".join(parts).encode())


def _loads_or_is_a_config_error(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        load(path, Run)
    except ConfigError as error:
        assert all(line.startswith(f"{path}:") for line in str(error).split("\n"))
