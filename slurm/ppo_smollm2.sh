#!/bin/bash
# PPO of SmolLM2-135M on two CPU cores of one node: a trial of a cluster without its GPUs.
#   sbatch slurm/ppo_smollm2.sh [key=value ...]
# Submit from the checkout. Options of sbatch win over the lines below, key=value over the configuration.
#SBATCH --job-name=ppo_smollm2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem-per-cpu=4000
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log

# What differs between sites. Partition and account: SBATCH_PARTITION and SBATCH_ACCOUNT, or options of sbatch.
HPC_RL=${HPC_RL:-$SLURM_SUBMIT_DIR} # the checkout, on a filesystem that all nodes see
VENV=${VENV:-$HPC_RL/.venv} # made by: bash launch/setup_env.sh --cpu --with smollm2
CONFIG=${CONFIG:-configs/ppo_smollm2.yaml}
RUN=${RUN:-runs/$SLURM_JOB_NAME}

set -euo pipefail
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK} SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=1
cd "$HPC_RL"
exec "$VENV/bin/hpc-rl" launch --supervise "$CONFIG" run.dir="$RUN" resume=auto launch.device=cpu "$@"
