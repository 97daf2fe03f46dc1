"""What `python -m scripts.docs` writes is what the code says now."""

import ast
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_compress.session import Session

ROOT = Path(__file__).parents[2]
PAGES = {"reference": "docs/yaml_reference.md", "troubleshooting": "docs/troubleshooting.md"}


@pytest.mark.parametrize("function", PAGES)
def test_the_page_is_up_to_date(function):
    """In a process of its own: tests register compressors, which are not the package's."""
    code = f"from scripts.docs import {function}; print({function}(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    page = (ROOT / PAGES[function]).read_text(encoding="utf-8")
    assert done.stdout == page, f"{PAGES[function]} is stale; run: python -m scripts.docs"


def test_every_compressor_has_its_settings():
    page = (ROOT / PAGES["reference"]).read_text(encoding="utf-8")
    for name in ("fixed_point", "tah_quant", "nvfp4"):
        assert f"### `compressor: {name}`" in page


def test_refusals_are_there_with_their_fix():
    page = (ROOT / PAGES["troubleshooting"]).read_text(encoding="utf-8")
    assert "* use_ring_exchange_p2p: its transfers are not torch.distributed's; set it to False\n" in page
    assert "* rank … did not start compression within … s of the others; call" in page


def test_every_reason_for_a_plain_message_is_explained():
    tree = ast.parse(textwrap.dedent(inspect.getsource(Session)))
    why = next(node for node in tree.body[0].body if getattr(node, "name", "") == "_why_plain")
    reasons = [
        node.value.value
        for node in ast.walk(why)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value
    ]
    assert len(reasons) >= 7
    page = (ROOT / PAGES["troubleshooting"]).read_text(encoding="utf-8")
    assert [reason for reason in [*reasons, "would grow", "first epoch"] if f"| {reason} |" not in page] == []
