"""The compression configuration: which compressor serves which axis and direction, and what stays plain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    create_model,
    field_validator,
    model_validator,
)

from megatron_compress import registry, strict_yaml
from megatron_compress.collectives.all_reduce import Algorithm
from megatron_compress.compressors.base import Compressor
from megatron_compress.strict_model import StrictModel, nearest, refusal

Axis = Literal["pipeline", "tensor"]
Direction = Literal["forward", "backward"]
Site = Literal["embedding", "head", "attention", "mlp"]

AXES: tuple[Axis, ...] = ("pipeline", "tensor")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def _as_set(items: tuple) -> tuple:
    return tuple(sorted(set(items)))


# A YAML list read as a set; kept as a sorted tuple, so that equal sets give equal digests.
_Stages = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False), AfterValidator(_as_set)]
_Sites = Annotated[tuple[Site, ...], Field(strict=False), AfterValidator(_as_set)]


class Rule(StrictModel):
    """How one direction of one axis is compressed.

    In a file, and as keywords, the compressor is given by its registered name with its own settings flat beside the
    rule's keys: `{compressor: fixed_point, bits: 6, min_bytes: 4096}`.
    """

    axis: ClassVar[Axis]

    compressor: InstanceOf[Compressor] = Field(description="Its registered name; its settings stand beside these keys")
    min_bytes: int = Field(default=0, ge=0, description="Tensors of fewer bytes are sent plainly, and counted")
    first_step: int = Field(default=0, ge=0, description="First training step that is compressed")
    exempt_stages: _Stages = Field(default=(), description="Pipeline stages whose outgoing messages stay plain")

    @model_validator(mode="before")
    @classmethod
    def _build_compressor(cls, data: Any) -> Any:
        """Replace the compressor's name, and its settings among the rule's keys, by the compressor."""
        if not isinstance(data, dict) or isinstance(data.get("compressor"), Compressor):
            return data
        chosen = cls._chosen(data)
        flat = _flat_model(cls, chosen).model_validate(data)
        settings = chosen.Settings(**{key: getattr(flat, key) for key in chosen.Settings.model_fields})
        return {key: getattr(flat, key) for key in cls.model_fields} | {"compressor": chosen(settings)}

    @classmethod
    def _chosen(cls, data: dict[str, Any]) -> type[Compressor]:
        name = data.get("compressor")
        if name in registry.names():
            return registry.get(name)
        known = f"registered: {', '.join(registry.names())}"
        if "compressor" not in data:
            raise refusal(cls, "compressor", data, f"this key is missing; add the name of a compressor, {known}")
        if not isinstance(name, str):
            raise refusal(cls, "compressor", name, f"must be the name of a compressor, got {name!r}; {known}")
        hint = nearest(name, registry.names())
        raise refusal(cls, "compressor", name, f"unknown compressor {name!r}{hint}; {known}")

    @field_validator("compressor")
    @classmethod
    def _serves_axis(cls, compressor: Compressor) -> Compressor:
        if reason := compressor.refuse_axis(cls.axis):
            raise ValueError(f"{compressor.name} cannot serve the {cls.axis} axis: {reason}")
        return compressor

    def canonical(self) -> dict[str, Any]:
        """All that tells this rule from another, as values that JSON can hold."""
        settings = self.compressor.settings.model_dump()
        return {"compressor": self.compressor.name, "settings": settings, **self.model_dump(exclude={"compressor"})}

    def describe(self) -> str:
        """The compressor with its settings, and what stays plain all the same."""
        return "; plain: ".join(filter(None, [repr(self.compressor), ", ".join(self._plain())]))

    def _plain(self) -> Iterator[str]:
        if self.min_bytes:
            yield f"tensors below {self.min_bytes} bytes"
        if self.first_step:
            yield f"steps before {self.first_step}"
        if self.exempt_stages:
            yield f"stages {' '.join(map(str, self.exempt_stages))}"


class PipelineRule(Rule):
    """A rule for the point-to-point messages between pipeline stages."""

    axis = "pipeline"
    misplaced: ClassVar[dict[str, str]] = {
        "exempt_sites": "a pipeline message leaves a whole stage, not a site in it; use exempt_stages",
        "algorithm": "a pipeline message goes to one rank, there is no reduction to choose for; remove it",
    }


class TensorRule(Rule):
    """A rule for the reductions and gathers of tensor parallelism."""

    axis = "tensor"

    exempt_sites: _Sites = Field(default=("embedding", "head"), description="Parts of the model that stay plain")
    algorithm: Algorithm = Field(
        default="auto",
        description="How an all-reduce moves its payloads; auto: in one shot between two ranks, else in two",
    )

    def _plain(self) -> Iterator[str]:
        yield from super()._plain()
        if self.exempt_sites:
            yield f"sites {' '.join(self.exempt_sites)}"


@cache
def _flat_model(rule: type[Rule], compressor: type[Compressor]) -> type[BaseModel]:
    """A model with the rule's keys and the compressor's settings side by side, as a file has them.

    One model for both finds all errors at once, and names the nearest key of either.
    """
    keys = {name: (field.annotation, field) for name, field in rule.model_fields.items()}
    if taken := keys.keys() & compressor.Settings.model_fields.keys():
        raise TypeError(f"settings of compressor {compressor.name!r} must not use the rule's keys {sorted(taken)}")
    keys["compressor"] = (str, ...)
    misplaced = (ClassVar[dict[str, str]], rule.misplaced)
    return create_model(rule.__name__, __base__=(StrictModel, compressor.Settings), misplaced=misplaced, **keys)


def _refuse_null(rule: Any) -> Any:
    if rule is None:
        raise ValueError("has no value; give it `compressor: NAME`, or remove the key to send plainly")
    return rule


R = TypeVar("R", bound=Rule)


class AxisConfig(StrictModel, Generic[R]):
    """The rules of one axis; a direction without one is sent plainly."""

    forward: Annotated[R | None, BeforeValidator(_refuse_null)] = None
    backward: Annotated[R | None, BeforeValidator(_refuse_null)] = None


class LinearConfig(StrictModel):
    """How the linear layers of attention and MLP multiply, forward and backward; the head stays as it is."""

    method: Literal["halo"]
    level: Literal[0, 1, 2] = Field(description="HALO-0: no Hadamard; 1: of inputs and weights; 2: of errors as well")
    format: Literal["int8", "fp8", "fp6", "fp4", "int4"] = Field(description="of all operands, one scale a tensor")

    def describe(self) -> str:
        return f"{self.method}-{self.level} {self.format}"


class CompressionConfig(StrictModel):
    """Rules for activations (forward) and their gradients (backward) on both axes; or for linear layers; or both."""

    pipeline: AxisConfig[PipelineRule] = AxisConfig[PipelineRule]()
    tensor: AxisConfig[TensorRule] = AxisConfig[TensorRule]()
    linear: LinearConfig | None = None

    @model_validator(mode="after")
    def _has_a_rule(self) -> CompressionConfig:
        if self.linear is None and not any(rule for _, _, rule in self.rules()):
            raise ValueError(
                "nothing is compressed: there is no rule; add one, as in `pipeline: {forward: {compressor: identity}}`"
            )
        return self

    @model_validator(mode="after")
    def _only_activations_are_remembered(self) -> CompressionConfig:
        rule = self.pipeline.backward
        if rule and rule.compressor.remembers:
            raise ValueError(
                f"pipeline.backward: {rule.compressor.name} remembers activations, not gradients; quantize these "
                "directly, as the paper does: {compressor: fixed_point, bits: 8}"
            )
        return self

    @property
    def remembers(self) -> bool:
        """Whether a rule needs to know which samples a step is of."""
        return any(rule and rule.compressor.remembers for _, _, rule in self.rules())

    @classmethod
    def load(cls, path: str | Path) -> CompressionConfig:
        """Read a configuration file.

        Raises:
            ConfigError: all that is wrong with the file, each with its line and what to write instead.
        """
        return strict_yaml.load(path, cls)

    def rule(self, axis: Axis, direction: Direction) -> Rule | None:
        """The rule for one direction of one axis, or None where it is sent plainly."""
        return getattr(getattr(self, axis), direction)

    def rules(self) -> Iterator[tuple[Axis, Direction, Rule | None]]:
        """Every axis and direction, with its rule or None."""
        for axis in AXES:
            for direction in DIRECTIONS:
                yield axis, direction, self.rule(axis, direction)

    def digest(self) -> str:
        """SHA-256 (hex) over all that decides what is computed and what travels; equal for files that mean the same."""
        rules = {f"{axis}.{direction}": rule.canonical() for axis, direction, rule in self.rules() if rule}
        if self.linear:
            rules["linear"] = self.linear.model_dump()
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()

    def describe(self) -> list[str]:
        """One line for each axis and direction, and one for linear layers with a method, for logs."""
        lines = [
            f"{axis} {direction} → {rule.describe() if rule else 'plain'}" for axis, direction, rule in self.rules()
        ]
        return [*lines, f"linear → {self.linear.describe()}"] if self.linear else lines
