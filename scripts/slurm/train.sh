#!/usr/bin/env bash
# Training on a Slurm cluster, one process per GPU. From the checkout, with its environment active or in .venv:
#   sbatch --gpus-per-node 4 scripts/slurm/train.sh scripts/train_cascade.py CONFIG.yaml [flags]
#   sbatch --gpus-per-node 8 --nodes 4 scripts/slurm/train.sh scripts/train_generator.py --data_dir … --logdir …
# sbatch's own flags come before the file, and override those below. Repeat the command to resume.
#SBATCH --job-name=diff_dalle
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file elsewhere
[ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || . .venv/bin/activate
# On nodes with several networks: export NCCL_SOCKET_IFNAME=… GLOO_SOCKET_IFNAME=…

gpus=${SLURM_GPUS_ON_NODE:?error: the job has no GPUs: sbatch --gpus-per-node N …}
# The processes share the cores of their node evenly, and when one is lost the others name it before they end.
status=0
srun --ntasks=$((SLURM_JOB_NUM_NODES * gpus)) --ntasks-per-node="$gpus" --cpu-bind=none --kill-on-bad-exit=0 \
    python "$@" || status=$?
# 138: saved because of USR1, 300 seconds before the time limit. The same job continues from there.
if [ "$status" -eq 138 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
