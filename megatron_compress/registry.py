"""Compressors by name. Importing this module imports every file of `compressors/`, each of which registers its own."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from megatron_compress.compressors.base import Compressor

_CLASSES: dict[str, type[Compressor]] = {}


def register(name: str):
    """Class decorator: make a `Compressor` subclass selectable as `compressor: name` in YAML.

    Raises:
        ValueError: the name is taken by another class.
    """

    def add(cls: type[Compressor]) -> type[Compressor]:
        if name in _CLASSES:
            raise ValueError(f"compressor {name!r} is already registered by {_CLASSES[name].__module__}")
        cls.name = name
        _CLASSES[name] = cls
        return cls

    return add


def get(name: str) -> type[Compressor]:
    """The class registered under `name`.

    Raises:
        KeyError: unknown name; the message gives the nearest one and all of them.
    """
    _load_all()
    if name not in _CLASSES:
        near = difflib.get_close_matches(name, _CLASSES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise KeyError(f"unknown compressor {name!r}{hint}; registered: {', '.join(names())}")
    return _CLASSES[name]


def names() -> list[str]:
    """Registered names, sorted."""
    _load_all()
    return sorted(_CLASSES)


def create(name: str, **settings) -> Compressor:
    """Build a compressor from keyword settings, validated by its `Settings`."""
    cls = get(name)
    return cls(cls.Settings(**settings))


def _load_all() -> None:
    package = importlib.import_module("megatron_compress.compressors")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
