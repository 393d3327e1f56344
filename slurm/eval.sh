#!/bin/bash
# Scores a model, or a run's newest checkpoint, on the held-out prompts of its configuration (data.eval_prompts).
#   sbatch slurm/eval.sh [key=value ...]
#   CONFIG=runs/ppo_8b/config.yaml RUN=runs/ppo_8b sbatch slurm/eval.sh
# Submit from the checkout. Options of sbatch win over the lines below, key=value over the configuration.
#SBATCH --job-name=eval
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --output=slurm-%x-%j.log

# --exclusive: with all cores and GPUs of each node. Where GPUs must be asked for: SBATCH_GPUS_PER_NODE=8.

# What differs between sites. Partition and account: SBATCH_PARTITION and SBATCH_ACCOUNT, or options of sbatch.
HPC_RL=${HPC_RL:-$SLURM_SUBMIT_DIR} # the checkout, on a filesystem that all nodes see
VENV=${VENV:-$HPC_RL/.venv} # made by: bash launch/setup_env.sh --gpu
CONFIG=${CONFIG:-configs/ppo_8b.yaml}
RUN=${RUN:-runs/ppo_8b} # whose newest checkpoint is scored; without one, model.path is
MODULES=${MODULES:-} # for example "cuda/13.0 openmpi/5.0"
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-} # for example ib0; empty: NCCL chooses

set -euo pipefail
for m in $MODULES; do module load "$m"; done
[ -n "$NCCL_SOCKET_IFNAME" ] || unset NCCL_SOCKET_IFNAME
gpus=${SLURM_GPUS_ON_NODE:-0} # one rank on each, unless --ntasks-per-node says otherwise
ranks=${SLURM_NTASKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}
cpus=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE > ranks ? SLURM_CPUS_ON_NODE / ranks : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus} PYTHONUNBUFFERED=1
cd "$HPC_RL"
# No MPI plugin (ranks find each other through SLURM_*), ranks numbered node by node, one failing rank ends all.
exec srun --mpi=none --distribution=block --kill-on-bad-exit=1 --ntasks="$((SLURM_NNODES * ranks))" \
    --ntasks-per-node="$ranks" --cpus-per-task="$cpus" --gpus-per-node="$gpus" \
    "$VENV/bin/hpc-rl" eval "$CONFIG" run.dir="$RUN" resume=auto "$@"
