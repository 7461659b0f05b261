#!/usr/bin/env bash
# The same with one torchrun per node, for clusters whose srun starts one task per node only:
#   sbatch --gpus-per-node 8 --nodes 4 scripts/slurm/torchrun.sh scripts/train_cascade.py CONFIG.yaml [flags]
# torchrun does not pass Slurm's signal on: what comes after the last --save_interval (save_every) is lost at the limit.
#SBATCH --job-name=diff_dalle
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
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
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all, so that no pipe breaks
port=$((20000 + SLURM_JOB_ID % 20000))
exec srun --cpu-bind=none torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$gpus" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first:$port" "$@"
