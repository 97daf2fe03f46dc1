"""A resumed run repeats the uninterrupted one to the bit, in every layout."""

import json
from pathlib import Path

import pytest

from tests.training.resume_layouts import LAYOUTS
from tests.training.start import run, torchrun


@pytest.mark.timeout(900)
def test_every_layout_resumes_to_the_bit(saving_config, text):
    script = Path(__file__).with_name("resume_layouts.py")
    done = run(torchrun(2, script, saving_config, text), timeout=850)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["layout"] for result in results] == list(LAYOUTS)
    for result in results:
        assert len(result["whole"]) == result["log"] == 10
        assert result["resumed"] == result["whole"], result["layout"]
    assert done.stderr.count("resumed from") == len(LAYOUTS)
