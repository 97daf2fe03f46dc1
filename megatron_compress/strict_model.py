"""Models for configuration: values are never converted, unknown keys are refused and name the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError


class StrictModel(BaseModel):
    """Frozen pydantic model whose errors say what to write instead; nest them to describe a whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # Keys that someone may look for here although they mean nothing here, each with the reason. Subclasses fill it.
    misplaced: ClassVar[dict[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_keys(cls, data: Any, handler: ModelWrapValidatorHandler) -> Any:
        try:
            return handler(data)
        except ValidationError as error:
            details = [cls._explained(item) for item in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(error.title, details) from None

    @classmethod
    def _explained(cls, error: ErrorDetails) -> InitErrorDetails:
        """The same error; one about a key of this model that does not exist is told with the keys that do."""
        kind, message, loc = error["type"], error["msg"], error["loc"]
        if kind == "extra_forbidden" and len(loc) == 1:
            kind, message = "unknown_key", cls._unknown_key(str(loc[0]))
        context = {**error.get("ctx", {}), "message": message}
        return InitErrorDetails(type=PydanticCustomError(kind, "{message}", context), loc=loc, input=error["input"])

    @classmethod
    def _unknown_key(cls, key: str) -> str:
        if key in cls.misplaced:
            return f"not a key here: {cls.misplaced[key]}"
        return f"unknown key{nearest(key, cls.model_fields)}; valid keys here: {', '.join(cls.model_fields)}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """`"; nearest is 'x'"` with the choice nearest to `name`, or an empty string where none is near."""
    near = difflib.get_close_matches(name.lower(), list(choices), n=1)
    return f"; nearest is {near[0]!r}" if near else ""


def refusal(model: type[BaseModel], key: str, value: Any, message: str) -> ValidationError:
    """An error about `key` of `model`, to be raised inside a validator; `message` says what is wrong and what to do."""
    error = PydanticCustomError("refused", "{message}", {"message": message})
    return ValidationError.from_exception_data(model.__name__, [InitErrorDetails(type=error, loc=(key,), input=value)])
