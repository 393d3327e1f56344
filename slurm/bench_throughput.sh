#!/bin/bash
# How fast a step is on this cluster, phase by phase, and how far from the hardware's limit.
#   sbatch slurm/bench_throughput.sh [NAME [options of hpc-rl bench]]        NAME: step (default), reshard, checkpoint
# Prints a table; with --json, one object that a script can read.
#SBATCH --job-name=bench_throughput
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%x-%j.log

# What differs between sites. Partition and account: SBATCH_PARTITION and SBATCH_ACCOUNT, or options of sbatch.
HPC_RL=${HPC_RL:-$SLURM_SUBMIT_DIR} # the checkout
VENV=${VENV:-$HPC_RL/.venv} # made by: bash launch/setup_env.sh --gpu
MODULES=${MODULES:-} # for example "cuda/13.0"

set -euo pipefail
for m in $MODULES; do module load "$m"; done
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=1
cd "$HPC_RL"
[ $# -gt 0 ] || set -- step
# One task: the benchmark starts the ranks that it measures, one for each GPU of the node.
exec srun --mpi=none "$VENV/bin/hpc-rl" bench "$@"
