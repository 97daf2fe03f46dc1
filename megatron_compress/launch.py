"""Run somebody's training script, unchanged, with compression: `python -m megatron_compress.launch`, under torchrun.

`import megatron_compress.auto` does the same from inside a script.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from megatron_compress import whole_run
from megatron_compress.strict_yaml import ConfigError


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
        whole_run.begin(options.compress)
    except ConfigError as error:
        parser.error(str(error))
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)  # as if Python had been started with it
    runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    main()
