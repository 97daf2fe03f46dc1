#!/usr/bin/env bash
# Train one model: torchrun around `python -m megatron_compress train`, which gets every argument, as in
#
#   bash scripts/pretrain.sh --config configs/train/quickstart.yaml --compress configs/compress/mixed.yaml --out results/run
#
# `--resume` goes on from the newest checkpoint in --out, `--deterministic` repeats results to the bit. With several
# nodes, which must share the folder of --out, call it on each:
#   NPROC         processes on this node (default: its GPUs, or without any its cores)
#   NNODES        number of nodes (default: 1)
#   NODE_RANK     number of this node, from 0 (default: Slurm's)
#   MASTER_ADDR   address of node 0, and MASTER_PORT a free port there (default: 29500)
#   RETRIES       starts after a failed one, from the newest checkpoint, the same number on each node (default: 0)
# Values for a site stand in configs/site.sh, made from configs/site.example.sh, or in the file that SITE names.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
site=${SITE:-$root/configs/site.sh}
if [[ -n ${SITE:-} || -f $site ]]; then
    # shellcheck source=configs/site.example.sh
    source "$site"
fi

python=python3
if [[ -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi

nodes=${NNODES:-1}
if [[ $nodes != 1 ]]; then
    node=${NODE_RANK:-${SLURM_NODEID:?NODE_RANK is the number of this node, from 0}}
    : "${MASTER_ADDR:?is the address of node 0}"
fi

# Every start has a port of its own: a node that is early must not meet what is left of the last start.
launch() { # START ARGUMENTS...: torchrun in the place of this shell
    local rendezvous=(--standalone)
    if [[ $nodes != 1 ]]; then
        rendezvous=(--nnodes "$nodes" --node-rank "$node"
            --master-addr "$MASTER_ADDR" --master-port $((${MASTER_PORT:-29500} + $1)))
    fi
    exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "${NPROC:-auto}" \
        -m megatron_compress train "${@:2}"
}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Megatron overlaps communication with GEMMs in the order of their launch, which takes one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
resume=()
for ((start = 0; start < ${RETRIES:-0}; start++)); do
    (launch "$start" "$@" "${resume[@]}") && exit
    echo "pretrain.sh: start $((start + 1)) failed; the next one goes on from the newest checkpoint" >&2
    resume=(--resume)
done
launch "$start" "$@" "${resume[@]}"
