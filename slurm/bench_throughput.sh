#!/bin/bash
# How fast a step is on this cluster, phase by phase, and how far from the hardware's limit.
#   sbatch slurm/bench_throughput.sh [NAME [options of hpc-rl bench]]        NAME: step (default), reshard, checkpoint
# Prints a table; with --json, one object that a script can read.
#SBATCH --job-name=bench_throughput
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%x-%j.log

# --exclusive: with all cores and GPUs of the node. Where GPUs must be asked for: SBATCH_GPUS_PER_NODE=8.

# What differs between sites. Partition and account: SBATCH_PARTITION and SBATCH_ACCOUNT, or options of sbatch.
HPC_RL=${HPC_RL:-$SLURM_SUBMIT_DIR} # the checkout
VENV=${VENV:-$HPC_RL/.venv} # made by: bash launch/setup_env.sh --gpu
MODULES=${MODULES:-} # for example "cuda/13.0"

set -euo pipefail
for m in $MODULES; do module load "$m"; done
export PYTHONUNBUFFERED=1
cd "$HPC_RL"
[ $# -gt 0 ] || set -- step
# One task: the benchmark starts the ranks that it measures, one for each GPU of the node.
exec srun --mpi=none --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --gpus-per-node="${SLURM_GPUS_ON_NODE:-0}" \
    "$VENV/bin/hpc-rl" bench "$@"
