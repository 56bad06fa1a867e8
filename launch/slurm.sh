#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A run on GPUs of a Slurm cluster (docs/gpu.md): a process a GPU. At the end of the
# time, or when the nodes are taken away, the step is saved and the job queued again;
# a lost process ends the others, and the job is queued again too.
#
#   launch/slurm.sh [--dry-run] OPTIONS -- ARGUMENTS OF bertjax.train
#
#   --nodes=N             (default 1)
#   --gpus=N              a node (default 1)
#   --cpus=N              a GPU (default 8)
#   --time=T              of one turn (default 24:00:00)
#   --name=N              of the job and its log (default bertjax)
#   --restarts=N          after failures in a row, at most (default 10)
#   --python=P            (default python)
#   --sbatch=OPTION       more for sbatch, e.g. --sbatch=--partition=a100; repeatable
#
# --dry-run prints every command it would run, and runs none.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

dry='' nodes=1 gpus=1 cpus=8 time=24:00:00 name=bertjax restarts=10 python=python
more=()
given=()
for word in "$@"; do
  [[ $word == --dry-run ]] || given+=("$word")  # what is printed is to be run
done
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --nodes=*) nodes=${1#*=} ;;
    --gpus=*) gpus=${1#*=} ;;
    --cpus=*) cpus=${1#*=} ;;
    --time=*) time=${1#*=} ;;
    --name=*) name=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --python=*) python=${1#*=} ;;
    --sbatch=*) more+=("${1#*=}") ;;
    -h | --help) sed -n '3,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
    --) shift; break ;;
    *) die "$1 is no option of $0 (--help lists them; bertjax.train's follow --)" ;;
  esac
  shift
done
for option in nodes gpus cpus restarts; do
  [[ ${!option} =~ ^[0-9]+$ ]] || die "--$option=${!option} is no number"
done
((nodes > 0)) || die "--nodes=$nodes is below 1"
check "$@"

# Inside the job: one task a GPU; jax finds the others by Slurm's variables.
train() {
  local status=0 count="$name-${SLURM_JOB_ID:-}.failures" failures=0
  act srun --kill-on-bad-exit=1 "$python" -m bertjax.train --multihost "$@" || status=$?
  if [[ -n $dry ]]; then
    act scontrol requeue "\$SLURM_JOB_ID"
    return
  fi
  # Slurm's own count has the planned turns too; this one lies beside the log.
  [[ ! -s $count ]] || failures=$(< "$count")
  case $status in
    0 | 2) rm -f "$count"; return "$status" ;;  # done; or the config is at fault
    130) return "$status" ;;
    143) rm -f "$count"; echo 'stopped and saved: queued again' ;;
    *)
      ((failures < restarts)) || return "$status"
      echo $((failures + 1)) > "$count"
      echo "exit status $status, failure $((failures + 1)): queued again" ;;
  esac
  scontrol requeue "$SLURM_JOB_ID"
}

if [[ -n ${SLURM_JOB_ID:-} && -z $dry ]]; then
  train "$@"
else
  # SIGTERM to the tasks two minutes before the end of the time. Wrapped, since Slurm
  # would copy a script to where it finds nothing that lies beside it.
  here=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  job='exec bash' quote="'" quoted="'\\''"
  for word in "$here/slurm.sh" "${given[@]}"; do
    job+=" '${word//"$quote"/"$quoted"}'"  # for sh, which runs what is wrapped
  done
  act sbatch --job-name="$name" --output="$name-%j.log" --open-mode=append --requeue \
    --signal=TERM@120 --nodes="$nodes" --ntasks-per-node="$gpus" \
    --gpus-per-node="$gpus" --cpus-per-task="$cpus" --time="$time" \
    ${more[@]+"${more[@]}"} --wrap="$job"
  [[ -z $dry ]] || train "$@"
fi
