"""docs/yaml_reference.md is what the models say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    """In a process of its own: tests register compressors, which are not the package's."""
    code = "from scripts.docs import reference; print(reference(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/yaml_reference.md").read_text(encoding="utf-8")
    assert done.stdout == page, "docs/yaml_reference.md is stale; run: python -m scripts.docs"
    for name in ("fixed_point", "tah_quant", "nvfp4"):
        assert f"### `compressor: {name}`" in page
