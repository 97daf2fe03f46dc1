"""`import megatron_compress.auto` in a training script compresses as the file `MEGATRON_COMPRESS_CONFIG` says.

Without the variable the import does nothing, so that the line can stay in the script.
"""

import os
from pathlib import Path

from megatron_compress import whole_run

if file := os.environ.get("MEGATRON_COMPRESS_CONFIG"):
    whole_run.begin(Path(file))
