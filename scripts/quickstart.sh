#!/usr/bin/env bash
# From a fresh checkout to the main result, on a CPU: install, then train a small GPT on real text with TP=2 x PP=2,
# plain and compressed, and print losses and bytes on the wire. Minutes on two cores.
#
#   bash scripts/quickstart.sh [--text FILE_OR_FOLDER] [--out FOLDER]
#
# The text is Python's own standard library unless given; results go to results/quickstart in the checkout.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bash "$root/scripts/install.sh"
export CUDA_VISIBLE_DEVICES=  # four ranks on the CPU, whatever GPUs there are
export OMP_NUM_THREADS=1      # more threads in each of the four would only fight for the cores
export PYTHONWARNINGS=ignore  # Megatron's, in each of the four, about every GPU package that is not there
exec "$root/.venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
    -m megatron_compress compare --config "$root/configs/train/quickstart.yaml" --out "$root/results/quickstart" "$@"
