#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A run on GPUs of a Slurm cluster (docs/gpu.md), with one process per GPU. At the end
# of its time, or when the nodes are taken away, the step is saved and the job queued
# again. If a process is lost, the others end, and the job is queued again too.
#
#   launch/slurm.sh [--dry-run] OPTIONS -- ARGUMENTS OF bertjax.train
#
#   --nodes=N             nodes (default 1)
#   --gpus=N              GPUs per node (default 1)
#   --cpus=N              CPUs per GPU (default 8)
#   --time=T              time limit of one turn (default 24:00:00)
#   --name=N              name of the job and its log (default bertjax)
#   --restarts=N          at most so many after failures in a row (default 10)
#   --python=P            Python to run (default python)
#   --sbatch=OPTION       pass to sbatch, e.g. --sbatch=--partition=a100; repeatable
#
# --dry-run prints every command and runs none.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

here=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dry='' nodes=1 gpus=1 cpus=8 time=24:00:00 name=bertjax restarts=10 python=python
more=()
given=()
own=1
for word in "$@"; do
  [[ $word != -- ]] || own=''
  # The printed command must really run.
  [[ $own && $word == --dry[-_]run ]] || given+=("$word")
done
while (($#)); do
  case $1 in
    --dry-run | --dry_run) dry=1 ;;
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
    *) no_option "$1" ;;
  esac
  shift
done
for option in nodes gpus cpus; do
  [[ ${!option} =~ ^[1-9][0-9]*$ ]] || die "--$option=${!option} is no number above 0"
done
[[ $restarts =~ ^(0|[1-9][0-9]*)$ ]] || die "--restarts=$restarts is no number"
for option in time name python; do
  [[ -n ${!option} ]] || die "--$option= is empty"
done
for word in ${more[@]+"${more[@]}"}; do
  [[ $word == -* ]] || die "--sbatch=$word is no option of sbatch"
done
# The name begins the names of files.
[[ $name != -* && $name != *[/[:space:]]* ]] ||
  die "--name=$name: without / and spaces, and no - first"
check "$@"
[[ -n $dry ]] || command -v "$python" > /dev/null ||
  die "--python=$python is not there"

# Print what the tasks wrote (slurm_task.py), "STATUS TASKS" per
# line; a shared disk may be late.
written() {
  local tries=0 each=''
  while ((tries++ < 10)); do
    each=$(cat "$1"/[0-9]* 2> /dev/null) || true
    [[ -z $each ]] || (($(wc -l <<< "$each") < ${each##* })) || break
    sleep 1
  done
  echo "$each"
}

# Runs in the job: one task per GPU; jax finds the others by Slurm's variables.
train() {
  unset BERTJAX_SLURM_JOB  # or what submits from there would not
  local status=0 mine="$name-${SLURM_JOB_ID:-JOB}" failures=0 each
  [[ -n $dry ]] || { rm -rf "$mine.statuses" && mkdir "$mine.statuses"; }
  # srun does not inherit --cpus-per-task from sbatch (Slurm 22.05 and later).
  act srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$cpus}" \
    "$python" "$here/slurm_task.py" "$mine.statuses" \
    "$python" -m bertjax.train --multihost "$@" || status=$?
  if [[ -n $dry ]]; then
    act scontrol requeue "\$SLURM_JOB_ID"
    return
  fi
  if ((status)); then
    each=$(written "$mine.statuses")
    echo "srun: $status; tasks: $(awk '{ print $1 }' <<< "$each" | sort -n | uniq -c |
      awk '{ print $1 " x " $2 }' | paste -s -d , -)"
    explain "$(awk '{ print $1 }' <<< "$each" | xargs)"
    if grep -q '^2 ' <<< "$each"; then
      status=2
    elif [[ -z $each ]] || (($(wc -l <<< "$each") < ${each##* })) ||
      grep -qvE '^(0|130|143) ' <<< "$each"; then
      # Some are lost or failed, and the others were stopped.
      [[ $status != 2 && $status != 130 && $status != 143 ]] || status=1
    elif grep -q '^130 ' <<< "$each"; then
      status=130
    else
      status=143
    fi
  fi
  rm -rf "$mine.statuses"
  # Slurm's own count includes planned turns; this one is stored beside the log.
  [[ ! -s $mine.failures ]] || failures=$(< "$mine.failures")
  case $status in
    0 | 2) rm -f "$mine.failures"; return "$status" ;;  # 2: the config is at fault
    130) return "$status" ;;
    143) rm -f "$mine.failures"; echo 'stopped and saved: queued again' ;;
    *)
      ((failures < restarts)) || return "$status"
      echo $((failures + 1)) > "$mine.failures"
      echo "exit status $status, failure $((failures + 1)): queued again" ;;
  esac
  scontrol requeue "$SLURM_JOB_ID"
}

# Slurm's variables alone prove nothing: this may be called inside
# another job (salloc, a notebook's).
if [[ -n ${BERTJAX_SLURM_JOB:-} && -z $dry ]]; then
  train "$@"
else
  # Slurm sends SIGTERM to the tasks two minutes before the time ends. The script is
  # wrapped, because Slurm would copy it to a place without the files beside it.
  [[ -z $dry ]] || unset SLURM_JOB_ID SLURM_CPUS_PER_TASK
  job='exec env BERTJAX_SLURM_JOB=1 bash' quote="'" quoted="'\\''"
  for word in "$here/slurm.sh" "${given[@]}"; do
    job+=" '${word//"$quote"/"$quoted"}'"  # for sh, which runs what is wrapped
  done
  act sbatch --job-name="$name" --output="$name-%j.log" --open-mode=append --requeue \
    --signal=TERM@120 --nodes="$nodes" --ntasks-per-node="$gpus" \
    --gpus-per-node="$gpus" --cpus-per-task="$cpus" --time="$time" \
    ${more[@]+"${more[@]}"} --wrap="$job"
  [[ -z $dry ]] || train "$@"
fi
