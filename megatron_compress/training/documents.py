"""Documents out of text files: a file is one, a line of a .jsonl file is one."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron_compress.strict_yaml import ConfigError

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_JSON_KEY = "text"


def documents(text: Path | None) -> Iterator[bytes]:
    """The documents of a file, of a folder of files, or of this Python's standard library (None), in order of name.

    Raises:
        ConfigError: there is no such file, or a line of a .jsonl file is no JSON object with a string "text".
    """
    for path in _standard_library() if text is None else _files(text):
        if path.suffix == ".jsonl":
            yield from _lines(path)
        else:
            yield path.read_bytes()


def name(text: Path | None) -> str:
    """For messages and results files."""
    return "Python standard library" if text is None else str(text)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    return sorted(paths)


def _files(text: Path) -> list[Path]:
    if text.is_file():
        return [text]
    paths = sorted(path for path in text.rglob("*") if path.is_file())
    if not paths:
        raise ConfigError(f"--text {text}: no such file, and no folder with files in it")
    return paths


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text(line, f"{path}:{number}").encode()


def _text(line: bytes, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; write one object a line") from None
    text = record.get(_JSON_KEY) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: no string "{_JSON_KEY}" in this line; write {{"{_JSON_KEY}": "..."}}')
    return text
