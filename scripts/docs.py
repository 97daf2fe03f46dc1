"""Write the pages that follow from the code: `python -m scripts.docs`. A test fails while a page on disk is another."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_compress import registry
from megatron_compress.config import PipelineRule, Rule, TensorRule
from megatron_compress.training.config import TrainConfig
from megatron_compress.training.model_config import ModelConfig
from scripts import refusals

REFERENCE = Path(__file__).parents[1] / "docs/yaml_reference.md"
TROUBLESHOOTING = REFERENCE.with_name("troubleshooting.md")

_INTRODUCTION = """# YAML reference

Written by `python -m scripts.docs` from the models that read the files; change those, not this page. A wrong key or
value is an error with file, line and the nearest valid name. Values are never converted: `6` is no text, `"6"` no
number.
"""
_COMPRESSION = """## Compression files

As in [`configs/compress/`](../configs/compress). `pipeline` and `tensor` each have a rule under `forward` (activations)
and under `backward` (their gradients); a direction without one is sent plainly. At least one rule must be given.
"""
_TRAINING = """## Training files

As in [`configs/train/`](../configs/train). Paths in a file are relative to it.
"""
_MODELS = """## Model files

As in [`configs/models/`](../configs/models).
"""
_MARK = "<!-- From here on written by python -m scripts.docs -->\n"
_ROW = "| {} | {} | {} | {} |"


def reference() -> str:
    """The text of docs/yaml_reference.md."""
    parts = [_INTRODUCTION, _COMPRESSION, *_compression(), _TRAINING, *_section(TrainConfig, ""), _MODELS]
    return "\n".join([*parts, _table(ModelConfig)])


def _compression() -> Iterator[str]:
    """The keys that every rule has, those of one axis alone, and each compressor's settings."""
    yield f"### Every rule\n\n{_table(PipelineRule)}"
    own = {name: field for name, field in TensorRule.model_fields.items() if name not in Rule.model_fields}
    yield f"### Rules of `tensor` also\n\n{_table_of(own)}"
    for name in registry.names():
        settings = registry.get(name).Settings
        keys = _table(settings) if settings.model_fields else "No settings.\n"
        yield f"### `compressor: {name}`\n\n{keys}"


def _section(model: type[BaseModel], path: str) -> Iterator[str]:
    """A table of the model's keys, then one of every model nested in it."""
    yield f"### {f'`{path}`' if path else 'The file'}\n\n{_table(model)}"
    for name, field in model.model_fields.items():
        if (nested := _nested(field.annotation)) is not None:
            yield from _section(nested, f"{path}.{name}".lstrip("."))


def _table(model: type[BaseModel]) -> str:
    return _table_of(model.model_fields)


def _table_of(fields: dict[str, FieldInfo]) -> str:
    rows = [_ROW.format(f"`{name}`", _kind(field), _default(field), _cell(field)) for name, field in fields.items()]
    return "\n".join([_ROW.format("key", "value", "default", "meaning"), _ROW.format(*["---"] * 4), *rows, ""])


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The model that a key holds, or a list of which it holds."""
    if typing.get_origin(annotation) is list:
        (annotation,) = typing.get_args(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _cell(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel):
        return "none" if value is None else "defaults of its keys"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _kind(field: FieldInfo) -> str:
    limits = " and ".join(filter(None, map(_limit, field.metadata)))
    return " ".join(filter(None, [_name(field.annotation), limits]))


def _limit(item: Any) -> str | None:
    for kind, sign, key in (
        (annotated_types.Ge, "≥", "ge"),
        (annotated_types.Gt, ">", "gt"),
        (annotated_types.Le, "≤", "le"),
        (annotated_types.Lt, "<", "lt"),
    ):
        if isinstance(item, kind):
            return f"{sign} {getattr(item, key)}"
    return None


def _name(annotation: Any) -> str:
    """A type as people write it in YAML."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(item) for item in arguments if item is not types.NoneType)
    if origin in (list, tuple):
        return f"list of: {_name(arguments[0])}"
    if (nested := _nested(annotation)) is not None:
        return f"mapping ({nested.__name__})"
    return {bool: "true, false", int: "whole number", float: "number", str: "text"}.get(annotation, "name")


def troubleshooting() -> str:
    """The text of docs/troubleshooting.md: people write what is above the mark, the code what is below."""
    written = TROUBLESHOOTING.read_text(encoding="utf-8").split(_MARK)[0]
    return f"{written}{_MARK}\n{refusals.page()}"


def main() -> None:
    for page, text in ((REFERENCE, reference()), (TROUBLESHOOTING, troubleshooting())):
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
