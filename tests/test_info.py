"""`info` says what there is, and why not the rest."""

import torch
from typer.testing import CliRunner

from megatron_compress.cli import app


def test_info_names_hooks_and_what_is_missing():
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "names of megatron-core" in text and "as expected" in text
    if not torch.cuda.is_available():
        assert "GPU ✗" in text and "compressors run as their PyTorch reference" in text
