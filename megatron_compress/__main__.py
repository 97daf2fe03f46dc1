"""`python -m megatron_compress`"""

from megatron_compress.cli import app

app(prog_name="megatron_compress")
