"""Promises about the repository itself: file sizes, links, and what importing the package needs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = {".py": 300, ".cu": 400, ".cuh": 400, ".cpp": 400}
OPTIONAL_PACKAGES = ("megatron", "transformer_engine", "apex", "flash_attn", "triton")


def _files(*suffixes: str) -> Iterator[Path]:
    """Files of the checkout, without environments, caches and builds."""
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in suffixes and parts[0] != "build" and not any(part.startswith(".") for part in parts):
            yield path


def test_no_source_file_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in _files(*MAX_LINES)}
    too_long = [f"{path.relative_to(ROOT)}: {n}" for path, n in lengths.items() if n > MAX_LINES[path.suffix]]
    assert lengths
    assert not too_long


def test_every_local_link_in_markdown_leads_somewhere():
    broken = []
    for page in _files(".md"):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose):
            file = target.split("#")[0]
            if file and not re.match(r"[a-z]+:", target) and not (page.parent / file).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken


def test_the_package_imports_without_its_optional_packages():
    """Neither needs them nor tries them: Megatron and kernels are loaded by hooks and ops when these are asked for."""
    code = (
        "import sys, torch\n"  # torch may load Triton for itself where that is installed
        "tried = []\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.split('.')[0] in {OPTIONAL_PACKAGES!r}:\n"
        "            tried.append(name)\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import megatron_compress, megatron_compress.config\n"
        "megatron_compress.config.registry.names()\n"
        "assert not tried, tried\n"
    )
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=no_gpu, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
