"""What the package says when it refuses, gives up or warns, taken from its source, for docs/troubleshooting.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_compress"
# Where each kind is said.
_SECTIONS = {
    "A setting of Megatron that compression cannot honour": ("hooks/refusals.py", "hooks/overlap.py"),
    "The release of Megatron": ("hooks/seams.py",),
    "The other ranks": ("peers.py",),
    "Installing": ("hooks/install.py", "hooks/active.py", "whole_run.py"),
    "CUDA kernels": ("ops/extension.py",),
}
# Shorter texts are names and formats.
_SENTENCE = 40


def page() -> str:
    """A section for each kind."""
    parts = []
    for title, modules in _SECTIONS.items():
        items = [f"* {sentence}" for module in modules for sentence in sentences(module)]
        parts.append("\n".join([f"### {title}\n", *items, ""]))
    return "\n".join(parts)


def sentences(module: str) -> list[str]:
    """All texts of a module that are sentences, docstrings left out, with … where a run fills something in."""
    return list(_sentences(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))))


def _sentences(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    text = _text(node)
    if text is None:
        for child in ast.iter_child_nodes(node):
            yield from _sentences(child)
    elif len(text) >= _SENTENCE and " " in text:
        yield re.sub(r"%[sdf]|%\.0f", "…", text.strip())


def _text(node: ast.AST) -> str | None:
    """Of a string, a formatted one, or a sum that begins with one; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and (left := _text(node.left)) is not None:
        return left + (_text(node.right) or "…")
    return None
