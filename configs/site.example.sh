# shellcheck shell=bash
# What differs between clusters. Copy it to configs/site.sh, which git ignores, and change it there; scripts/pretrain.sh
# and scripts/pretrain_slurm.sbatch read it on each node. Values of the environment come first.

# Processes on a node; unset: its GPUs.
#export NPROC=${NPROC:-8}

# Starts after a failed one, from the newest checkpoint.
export RETRIES=${RETRIES:-2}

# Network interface between the nodes, where the default one is not it (NCCL's and gloo's).
#export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-ib0}
#export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ib0}

# What a node needs before Python starts.
#module load cuda
