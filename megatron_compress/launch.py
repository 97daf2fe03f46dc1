"""Run somebody's training script, unchanged, with compression: `python -m megatron_compress.launch`, under torchrun.

`import megatron_compress.auto` does the same from inside a script.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import runpy
import sys
from pathlib import Path

from rich.console import Console

import megatron_compress
from megatron_compress import cpu
from megatron_compress.hooks.active import Active, get_active
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.traffic import Traffic

# How long the first rank waits for the counts of the others when its own script is through.
_REPORT_SECONDS = 20.0


def begin(config: Path) -> None:
    """Install the hooks, and report the traffic when this process ends.

    Raises:
        ConfigError, UnsupportedMegatronError: as `megatron_compress.install`.
    """
    cpu.apply()
    if os.environ.get("RANK", "0") == "0" and not logging.getLogger().handlers:
        _show_log()
    megatron_compress.install(config)
    atexit.register(_end)


def _show_log() -> None:
    """A script that has not set up logging yet would not show what was installed."""
    logger = logging.getLogger("megatron_compress")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _end() -> None:
    """The first rank prints what all ranks sent. One that an exception ends prints its own: the others may be stuck."""
    active = get_active()
    if active is None:
        return  # the script has called `uninstall`
    traffic = active.session.traffic
    if hasattr(sys, "last_value"):  # an exception has ended the script
        _print(traffic, f"rank {active.watch.rank}, which an exception ended")
        return
    parts = active.watch.finish(traffic.on_host(), _REPORT_SECONDS)
    if active.watch.rank == 0:
        _print(Traffic.total(parts.values()), _owner(parts, active))
    megatron_compress.uninstall()


def _owner(parts: dict[int, Traffic], active: Active) -> str:
    missing = [rank for rank in range(active.watch.size) if rank not in parts]
    return f"all {active.watch.size} ranks" if not missing else f"all ranks but {missing}, which sent no counts"


def _print(traffic: Traffic, owner: str) -> None:
    if traffic.rows():
        Console(highlight=False).print(traffic.table(owner))
    else:
        print(f"megatron_compress: {owner}: no message reached the hooks, so nothing was compressed", flush=True)


def main() -> None:
    """Take the launcher's own arguments off the command line and become the script."""
    parser = argparse.ArgumentParser("megatron_compress.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--compress", required=True, type=Path, metavar="FILE", help="compression config file")
    parser.add_argument("script", type=Path, help="Python file to run as __main__")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args()
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    try:
        begin(options.compress)
    except ConfigError as error:
        parser.error(str(error))
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)  # as if Python had been started with it
    runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    main()
