#!/bin/bash
# One worker per GPU, eight in all, on one study. Submit with: sbatch slurm.sh; once more for eight more workers.
# The study's folder lies on the cluster's file system. The database's password is in ~/.pgpass (chmod 600), not here.
#SBATCH --job-name=layerskip
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=layerskip-%j.out
set -euo pipefail

STUDY="${STUDY:-$SLURM_SUBMIT_DIR/studies/my_model}"
STORAGE="${STORAGE:-postgresql+psycopg://search@db.example.org/search}"

# A worker that is killed, or whose node fails, is missed by nobody: its trial is queued again and the others go on.
srun --kill-on-bad-exit=0 --label python -m search.run --study "$STUDY" --storage "$STORAGE" --device cuda
