"""The example of docs/adding_a_compressor.md is what the page says: a whole file that holds every general property."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/adding_a_compressor.md"
# Puts the example's folder beside the package's own, as if its file had been saved there.
PLUGIN = "import megatron_compress.compressors as folder\nfolder.__path__.append({folder!r})\n"


def test_the_example_holds_the_general_properties(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    example = tmp_path / "compressors"
    example.mkdir()
    (example / "row_scaled.py").write_text(blocks[0])
    (tmp_path / "with_example.py").write_text(PLUGIN.format(folder=str(example)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "with_example", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/compressors/test_properties.py", "-k", "row_scaled"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed, \d+ deselected", done.stdout)
    assert passed and int(passed[1]) >= 15, done.stdout
