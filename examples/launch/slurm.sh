#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1-4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# sbatch slurm.sh train.py --its-own-arguments. On as many of 1 to 4 machines as Slurm has; two minutes before its time is
# over, or when it is preempted, the run saves, ends with status 75, and is put into the queue again: with fewer or more
# machines it goes on from there.
set -uo pipefail
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 20000))"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds to save in
srun --kill-on-bad-exit=0 "${PYTHON:-python}" -m shardfn.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$head" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" "$@"
status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
