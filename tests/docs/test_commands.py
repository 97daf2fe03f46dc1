"""Every command that README and docs show is one that there is, with its options and files, and is run by a test."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from megatron_compress.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Which test runs each, and what it calls it. `bench kernels` needs a GPU: its recorded results say how it was run.
RUN_BY = {
    "bash scripts/quickstart.sh": (__file__, "scripts/quickstart.sh"),
    "bash scripts/test.sh": (".ci/run", "scripts/test.sh"),
    "bash scripts/pretrain.sh": ("tests/training/test_pretrain.py", "scripts/pretrain.sh"),
    "torchrun -m megatron_compress.launch": ("tests/hooks/test_launch.py", '"megatron_compress.launch"'),
    "python -m pytest": ("tests/docs/test_adding_a_compressor.py", '"pytest"'),
    "python -m scripts.docs": ("tests/docs/test_written_pages.py", "from scripts.docs import"),
    "prepare": ("tests/training/test_commands.py", '"prepare"'),
    "import-model": ("tests/training/test_commands.py", '"import-model"'),
    "report": ("tests/training/test_report.py", '"report"'),
    "netbed": ("tests/netbed/test_training.py", '"netbed"'),
    "bench kernels": ("docs/results/kernels/README.md", "bench kernels"),
    **{name: (__file__, f'"{name}"') for name in ("plan", "explain", "info")},
}


def _commands() -> list[str]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line.split("  #")[0].strip() for line in lines if line.strip()]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found += re.findall(r"`((?:python -m|bash|torchrun) [^`]+)`", prose)
    return sorted(set(found))


def _name(command: str) -> str:
    """As in RUN_BY."""
    if command.startswith("torchrun"):
        return "torchrun -m " + re.search(r" -m (\S+)", command)[1]
    words = shlex.split(command)
    if words[:3] != ["python", "-m", "megatron_compress"]:
        return " ".join(words[: 3 if words[1] == "-m" else 2])
    return " ".join(words[3:5] if words[3] == "bench" else words[3:4])


def _of_ours(*names: str) -> list[str]:
    ours = [command for command in _commands() if command.startswith("python -m megatron_compress ")]
    return [command for command in ours if not names or _name(command) in names]


@pytest.mark.parametrize("command", _commands())
def test_a_test_runs_it(command):
    file, words = RUN_BY[_name(command)]
    assert words in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", _of_ours())
def test_its_options_exist(command):
    group, words = typer.main.get_command(app), shlex.split(command)[3:]
    context = group.make_context("megatron_compress", list(words), resilient_parsing=False)
    while hasattr(group, "resolve_command"):
        name, group, words = group.resolve_command(context, words)
        context = group.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("command", _commands())
def test_its_files_exist(command):
    for word in shlex.split(command):
        if word.startswith(("configs/", "scripts/", "tests/")):
            assert (ROOT / word).exists() or (ROOT / f"{word}.yaml").exists(), word


@pytest.mark.parametrize("command", _of_ours("plan", "explain", "info"))
def test_it_runs(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, shlex.split(command)[3:])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_runs(tmp_path):
    """In the checkout's own environment, for a few steps."""
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", "--steps", "20", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "traffic of" in done.stdout and (tmp_path / "results.json").exists()
