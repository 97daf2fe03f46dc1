"""Strict YAML: a file becomes an instance of a pydantic model, or an error that names file, line and remedy.

ruamel.yaml only composes the node tree (YAML 1.2). The values are built here out of mappings, lists and plain
scalars, so that no tag can construct an object, and every path keeps the line it was written on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver

from megatron_compress.strict_model import nearest

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]

# Aliases let a short file stand for a huge one; no configuration comes near this many values.
MAX_VALUES = 10_000

_TAG_PREFIX = "tag:yaml.org,2002:"
_PLAIN_SCALARS = ("str", "int", "float", "bool", "null")

# Part of a message of ruamel.yaml -> what a user can act on.
_SYNTAX_MESSAGES = {
    r"'\t'": "a tab where YAML wants spaces; indent with spaces",
    "another document": "a second document starts here; keep one document a file",
    "mapping values are not allowed": "a second `: ` in one line; write one key a line, or put text in quotes",
}


class ConfigError(ValueError):
    """What is wrong with a configuration file: one `file:line: what; nearest valid name; what to do` a line."""


def load(path: str | Path, model: type[Model]) -> Model:
    """Read the YAML file at `path` as `model`.

    Args:
        path: a file of one YAML document, a mapping.
        model: pydantic model; derive it and what it nests from `StrictModel`, so that unknown keys are refused
            with the nearest valid one.

    Raises:
        ConfigError: the file is missing, empty or no YAML, or its content does not fit `model`; all that is wrong.
    """
    path = Path(path)
    values, lines = _read_values(path, _read_text(path))
    if values is None:
        raise _error(path, (1, f"the file is empty; write some of the keys {', '.join(model.model_fields)}"))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _error(path, *_problems(error, lines)) from None


def _error(path: Path, *problems: tuple[int, str]) -> ConfigError:
    one_a_line = [f"{path}:{line}: {message}".replace("\n", " ") for line, message in sorted(set(problems))]
    return ConfigError("\n".join(one_a_line))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.glob("*.y*ml")]
        raise ConfigError(f"{path}: no such file{nearest(path.name, siblings)}; give the path of a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _error(path, (line, "not UTF-8 text; save the file as UTF-8")) from None


def _read_values(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    """The document as dicts, lists and scalars, and the line of every path in it."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Yaml12Resolver
    try:
        root = yaml.compose(text)
        reader = _Reader(yaml)
        values = None if root is None else reader.value(root, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _error(path, (mark.line + 1, _describe_syntax(error))) from None
    except YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise _error(path, (line, f"not YAML: {str(error).splitlines()[0]}; remove it")) from None
    except RecursionError:
        message = "nested too deeply, or an alias contains itself; write the values out"
        raise _error(path, (1, message)) from None
    if reader.problems:
        raise _error(path, *reader.problems)
    return values, reader.lines


class _Yaml12Resolver(VersionedResolver):
    """Reads scalars by YAML 1.2 whatever a %YAML line says, so that `yes` and `010` mean the same in every file."""

    processing_version = (1, 2)


class _Reader:
    """Builds plain values from nodes; notes the line of every path, and every problem instead of only the first."""

    def __init__(self, yaml: YAML):
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[tuple[int, str]] = []
        self._constructor = yaml.constructor
        self._nodes_left = MAX_VALUES

    def value(self, node: Node, path: KeyPath) -> Any:
        self._count(node)
        self.lines.setdefault(path, _line(node))  # a mapping has noted the line of the key already
        kind = node.tag.removeprefix(_TAG_PREFIX)
        if isinstance(node, MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and kind in _PLAIN_SCALARS:
            return self._scalar(node, kind)
        if kind == "timestamp":
            return self._problem(node, f"{node.value} is a date; put it in quotes to make it text")
        return self._problem(node, f"tag {node.tag!r} is refused: only plain values are read; remove the tag")

    def _scalar(self, node: ScalarNode, kind: str) -> Any:
        try:
            return self._constructor.construct_object(node)
        except (ValueError, LookupError):  # an explicit tag, as in `!!int six`
            return self._problem(node, f"{node.value!r} is no {kind}; remove the tag")

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values = {}
        for key, (key_node, value_node) in self._pairs(node).items():
            self.lines[(*path, key)] = _line(key_node)
            values[key] = self.value(value_node, (*path, key))
        return values

    def _pairs(self, node: MappingNode) -> dict[str, tuple[Node, Node]]:
        """Nodes of key and value by key; the mapping's own keys win over those that `<<` merges in."""
        self._count(node)
        pairs: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG_PREFIX + "merge":
                continue
            key = self._key(key_node)
            if key in pairs:
                first = _line(pairs[key][0])
                self._problem(key_node, f"key {key!r} is already set on line {first}; keep one of the two")
            elif key is not None:
                pairs[key] = (key_node, value_node)
        for source in self._merged(node):
            pairs = self._pairs(source) | pairs
        return pairs

    def _merged(self, node: MappingNode) -> list[MappingNode]:
        sources = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG_PREFIX + "merge":
                sources += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        for source in sources:
            if not isinstance(source, MappingNode):
                self._problem(source, "<< merges a mapping or a list of mappings; give it aliases of such (*name)")
        return [source for source in sources if isinstance(source, MappingNode)]

    def _key(self, node: Node) -> str | None:
        if isinstance(node, ScalarNode) and node.tag == _TAG_PREFIX + "str":
            return node.value
        shown = repr(node.value) if isinstance(node, ScalarNode) else "made of several values"
        return self._problem(node, f"key {shown} is not text; write a name, or put it in quotes")

    def _problem(self, node: Node, message: str) -> None:
        self.problems.append((_line(node), message))

    def _count(self, node: Node) -> None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise MarkedYAMLError(
                problem=f"more than {MAX_VALUES} values with aliases written out; use fewer of them",
                problem_mark=node.start_mark,
            )


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def _describe_syntax(error: MarkedYAMLError) -> str:
    problem = error.problem or error.context
    for part, message in _SYNTAX_MESSAGES.items():
        if part in problem:
            return message
    where = f" ({error.context} that starts on line {error.context_mark.line + 1})" if error.context_mark else ""
    return f"not valid YAML: {problem}{where}; check brackets, quotes and indentation"


def _problems(error: ValidationError, lines: dict[KeyPath, int]) -> Iterator[tuple[int, str]]:
    """Line and `key path: what; what to do` of each problem that pydantic found."""
    errors_at = defaultdict(list)
    for item in error.errors(include_url=False):
        # The part of the location that is in the file: without the names of a union's members, or a missing key.
        written = next(item["loc"][:end] for end in range(len(item["loc"]), -1, -1) if item["loc"][:end] in lines)
        absent = item["loc"][len(written) :] if item["type"] in ("missing", "refused") else ()
        errors_at[written, absent].append(item)
    for (written, absent), errors in errors_at.items():
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in written + absent)
        yield lines[written], ": ".join(filter(None, [where.lstrip("."), _reword(errors)]))


def _reword(errors: list[ErrorDetails]) -> str:
    """One message for the errors at one place; several are the alternatives of a union."""
    musts = [error for error in errors if error["msg"].startswith("Input should be")]
    if not musts:
        missing = errors[0]["type"] == "missing"
        return "this key is missing; add it" if missing else errors[0]["msg"].removeprefix("Value error, ")
    wanted = " or ".join(_wanted(error["msg"]) for error in musts)
    value = musts[0]["input"]
    return f"must be {wanted}, got {_show(value)}{_remedy(wanted, value)}"


def _wanted(message: str) -> str:
    message = message.removeprefix("Input should be ")
    message = re.sub(r"a valid (tuple|set|frozenset)\b", "a valid list", message)
    return re.sub(r"a valid dictionary.*|an instance of .*", "a mapping (lines of `key: value`)", message)


def _remedy(wanted: str, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    if re.search(r"valid (integer|number)", wanted) and re.fullmatch(r"[-+.\deE]*\d[-+.\deE]*", value):
        return "; remove the quotes"
    return nearest(value, re.findall(r"'([^']*)'", wanted))


def _show(value: Any) -> str:
    """A value as a YAML file would have it."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)
