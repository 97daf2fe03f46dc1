#!/usr/bin/env bash
# Train one model: torchrun around `python -m megatron_compress train`, which gets every argument, as in
#
#   bash scripts/pretrain.sh --config configs/train/quickstart.yaml --compress configs/compress/mixed.yaml --out results/run
#
# `--resume` goes on from the newest checkpoint in --out, `--deterministic` repeats results to the bit. With several
# nodes, which must share the folder of --out, call it on each:
#   NPROC         processes on this node (default: its GPUs, or without any its cores)
#   NNODES        number of nodes (default: 1)
#   NODE_RANK     number of this node, from 0
#   MASTER_ADDR   address of node 0, and MASTER_PORT a free port there (default: 29500)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=python3
if [[ -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi

if [[ ${NNODES:-1} == 1 ]]; then
    rendezvous=(--standalone)
else
    : "${NODE_RANK:?is the number of this node, from 0}" "${MASTER_ADDR:?is the address of node 0}"
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Megatron overlaps communication with GEMMs in the order of their launch, which takes one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "${NPROC:-auto}" \
    -m megatron_compress train "$@"
