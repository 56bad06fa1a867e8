#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A run on Cloud TPU VMs, one slice or several, by queued resources (docs/tpu.md).
#
#   launch/tpu_vm.sh [--dry-run] OPTIONS COMMAND [-- ARGUMENTS OF bertjax.train]
#
#   create    ask for the TPUs and wait until they are there
#   install   install bertjax on all workers
#   run       start the training on all workers; it goes on without this terminal
#   keep      create, install, run; repeat what is needed until the run is done:
#             after a preemption the TPUs are asked for anew and the run resumes
#   logs      follow the first worker's log
#   status    the exit status of every worker, or "running"
#   stop      end the run: all workers save the same step (SIGTERM)
#   delete    give the TPUs back
#
#   --name=N --zone=Z     of the queued resource
#   --type=T              v5litepod-16, v5p-32, v6e-64, v4-32 ...
#   --version=V           of the image; default: what fits the type
#   --slices=N            more than one: multi-slice (default 1)
#   --spot                may be preempted, and costs less
#   --project=P           default: gcloud's own
#   --package=P           what pip installs, e.g. 'bertjax[tpu] @ git+https://...'
#   --setup=COMMAND       on every worker after installing, e.g. to fetch a vocabulary:
#                         'gcloud storage cp gs://BUCKET/vocab.txt /tmp/vocab.txt'
#   --poll=SECONDS        between two looks (default 60)
#
# --dry-run prints every command it would run, and runs none.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

dry='' name='' zone='' type='' version='' slices=1 spot='' project='' poll=60 command=''
package='bertjax[tpu]' setup=true
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --version=*) version=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    --spot) spot=--spot ;;
    --project=*) project=${1#*=} ;;
    --package=*) package=${1#*=} ;;
    --setup=*) setup=${1#*=} ;;
    --poll=*) poll=${1#*=} ;;
    -h | --help) sed -n '3,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
    --) shift; break ;;
    -*) die "$1 is no option of $0 (--help lists them)" ;;
    *) [[ -z $command ]] || die "two commands: $command and $1"; command=$1 ;;
  esac
  shift
done
[[ -n $name ]] || die '--name is missing'
[[ -n $zone ]] || die '--zone is missing'
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices is no number"
where=("--zone=$zone" ${project:+"--project=$project"})

queued() { act gcloud compute tpus queued-resources "$@" "${where[@]}"; }

# A command line on every worker of every slice, at the same time.
everywhere() {
  queued ssh "$name" --worker=all --node=all --batch-size=1024 --command="$1"
}

# The request's state; ABSENT where there is none, UNKNOWN where gcloud does not say.
state() {
  local look=(describe "$name" '--format=value(state.state)') errors
  if [[ -n $dry ]]; then
    queued "${look[@]}" >&2
    echo ACTIVE
    return
  fi
  { errors=$(queued "${look[@]}" 2>&1 >&3); } 3>&1 && return
  case $errors in
    *NOT_FOUND*) echo ABSENT ;;
    *) echo "$errors" >&2; echo UNKNOWN ;;
  esac
}

image() {
  case $type in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    '') die '--type is missing, e.g. v5litepod-16' ;;
    *) die "--type=$type: which image? say --version (tpu7x: launch/gke_jobset.sh)" ;;
  esac
}

create() {
  local nodes=("--node-id=$name") found
  ((slices == 1)) || nodes=("--node-count=$slices" "--node-prefix=$name")
  [[ -n $version ]] || version=$(image) || exit 2
  queued create "$name" "${nodes[@]}" "--accelerator-type=${type:?}" \
    "--runtime-version=$version" ${spot:+"$spot"} || return
  while true; do
    found=$(state)
    case $found in
      ACTIVE) break ;;
      FAILED | SUSPEND* | ABSENT) echo "$name: $found" >&2; return 1 ;;
    esac
    echo "$name: $found" >&2
    sleep "$poll"
  done
}

# The images' own Python may be older than 3.11; uv brings one.
install() {
  everywhere "curl -LsSf https://astral.sh/uv/install.sh | sh && \
~/.local/bin/uv venv --allow-existing --python 3.12 ~/bertjax && \
~/.local/bin/uv pip install --python ~/bertjax/bin/python $(printf '%q' "$package") && \
$setup"
}

# Each worker writes ~/bertjax.log, and ~/bertjax.status when it has ended.
run() {
  everywhere "rm -f ~/bertjax.status; nohup setsid bash -c '\
\"\$@\" >> ~/bertjax.log 2>&1 & echo \$! > ~/bertjax.pid; \
wait \$!; echo \$? > ~/bertjax.status' run \
~/bertjax/bin/python -m bertjax.train --multihost $(printf '%q ' "$@")\
> /dev/null 2>&1 < /dev/null & sleep 1"
}

# A worker's exit status, "running", or 255 where nothing was started or it is gone.
status() {
  everywhere "cat ~/bertjax.status 2> /dev/null || \
{ kill -0 \$(cat ~/bertjax.pid) 2> /dev/null && echo running || echo 255; }"
}

# All that the workers say, each word once; "silent" where one of them does not answer.
statuses() {
  local said
  said=$({ status 2> /dev/null || echo silent; } |
    grep -xE 'running|silent|[0-9]+' | sort -u | xargs) || true
  echo "${said:-silent}"
}

begin() { create && install && run "$@"; }

again() {
  { everywhere 'test -x ~/bertjax/bin/python' || install; } && run "$@"
}

keep() {
  local found said known='' looks=0 ends=0 fails=0 silent=0 lost=0
  if [[ -n $dry ]]; then
    state > /dev/null
    queued delete "$name" --force --quiet
    begin "$@"
    status
    return
  fi
  while true; do
    found=$(state)
    case $found in
      UNKNOWN) [[ -n $known ]] || die "$name: gcloud says what is wrong above" ;;
      *) known=1 ;;
    esac
    case $found in
      ACTIVE)
        fails=0
        said=$(statuses)
        # Where a worker is gone the others end: those that run have lost none.
        [[ $said == *silent && $said != *running* ]] || silent=0 lost=0
        case " $said " in
          *' running '*) ((++looks < 30)) || ends=0 ;;
          ' 0 ' | ' 0 silent ') echo "$name: done" >&2; return ;;
          *' 2 '*) die "$name: the config or its input is at fault; logs says how" ;;
          *' silent ')  # perhaps it is being preempted
            echo "$name: a worker does not answer" >&2
            if ((++silent >= 10)); then
              ((++lost < 5)) || die "$name: not reached by ssh on 5 slices in a row"
              echo "$name: no answer in $silent looks, asking anew" >&2
              silent=0
              queued delete "$name" --force --quiet || true
            fi ;;
          *)
            ((++ends <= 5)) || die "$name: ended 5 times soon after its start; see logs"
            looks=0
            echo "$name: exit statuses $said, starting" >&2
            again "$@" || true ;;
        esac ;;
      FAILED | SUSPENDED)
        echo "$name: $found, asking anew" >&2
        queued delete "$name" --force --quiet || true ;;
      ABSENT)
        if begin "$@"; then
          fails=0
        else
          ((++fails < 5)) || die "$name: not begun in 5 attempts; the lines above say why"
        fi ;;
      *) ;;  # waiting, being provisioned or suspended; or gcloud did not say
    esac
    sleep "$poll"
  done
}

case $command in
  create) create ;;
  install) install ;;
  run) check_bucket "$@"; run "$@" ;;
  keep) check_bucket "$@"; keep "$@" ;;
  status) status ;;
  logs)
    queued ssh "$name" --worker=0 --node=0 --command='tail -n 100 -F ~/bertjax.log' ;;
  stop) everywhere "kill -TERM \$(cat ~/bertjax.pid)" ;;
  delete) queued delete "$name" --force --quiet ;;
  '') die 'which command? create install run keep logs status stop delete' ;;
  *) die "$command is no command: create install run keep logs status stop delete" ;;
esac
