"""The command `compare`, run for real: four processes, two tensor-parallel ranks in each of two pipeline stages."""

import json

from tests.training.start import PACKAGE, run, torchrun


def test_plain_training_repeats_itself_to_the_bit(write_files, train_values, model_values, text, tmp_path):
    config, out = write_files(train_values, model_values), tmp_path / "out"
    files = ["--config", config, "--text", text, "--out", out]
    done = run(torchrun(4, *PACKAGE, "compare", *files, "--deterministic"))
    assert done.returncode == 0, done.stderr
    assert "plain-again: the losses of all 5 steps equal those of plain to the bit" in done.stdout

    results = json.loads((out / "results.json").read_text())
    assert results["config"]["train"]["run"]["deterministic"]
    plain, again = ([step["loss_hex"] for step in arm["steps"]] for arm in results["arms"])
    assert len(plain) == 8 and again == plain[:5]
    assert results["arms"][0]["held_out_loss"] < results["arms"][0]["steps"][0]["loss"]
    assert len((out / "plain.jsonl").read_text().splitlines()) == 9
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
