#!/bin/bash
# GRPO of a 32B model: 8 nodes of 8 GPUs, no critic.
#   sbatch slurm/grpo_32b.sh [key=value ...]
#   sbatch --nodes=2 slurm/grpo_32b.sh model.path=configs/quickstart/model steps=2
# Submit from the checkout. Options of sbatch win over the lines below, key=value over the configuration.
#SBATCH --job-name=grpo_32b
#SBATCH --nodes=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
# --exclusive: with all cores and GPUs of each node; one rank runs on each GPU (else --ntasks-per-node=N). Where GPUs must
# be asked for: SBATCH_GPUS_PER_NODE=8.
# USR1: the supervisor hears of the time limit, has the ranks save, and requeues the job. --no-kill: a lost node does not end it.

# What differs between sites. Partition and account: SBATCH_PARTITION and SBATCH_ACCOUNT, or options of sbatch.
HPC_RL=${HPC_RL:-$SLURM_SUBMIT_DIR} # the checkout, on a filesystem that all nodes see
VENV=${VENV:-$HPC_RL/.venv} # made by: bash launch/setup_env.sh --gpu
CONFIG=${CONFIG:-configs/grpo_32b.yaml}
RUN=${RUN:-runs/$SLURM_JOB_NAME} # checkpoints and rollouts: on the parallel filesystem
MODULES=${MODULES:-} # for example "cuda/13.0 openmpi/5.0"
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-} # for example ib0; empty: NCCL chooses

set -euo pipefail
for m in $MODULES; do module load "$m"; done
[ -n "$NCCL_SOCKET_IFNAME" ] || unset NCCL_SOCKET_IFNAME
export PYTHONUNBUFFERED=1
cd "$HPC_RL"
# Starts the ranks with srun, and again after a failure: on the same nodes, with a spare one, or with fewer.
exec "$VENV/bin/hpc-rl" launch --supervise "$CONFIG" run.dir="$RUN" resume=auto "$@"
