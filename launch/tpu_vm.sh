#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A run on Cloud TPU VMs, with one or several slices, by queued resources (docs/tpu.md).
#
#   launch/tpu_vm.sh [--dry-run] OPTIONS COMMAND [-- ARGUMENTS OF bertjax.train]
#
#   create    request the TPUs and wait until they are ready
#   install   install bertjax on all workers
#   run       start the training on all workers; it does not need this terminal
#   keep      create, install, run; repeat what is needed until the run is done:
#             after a preemption it requests the TPUs again and the run resumes
#   logs      follow the first worker's log
#   status    print every worker's name, and its exit status or "running"
#   stop      end the run: all workers save the same step (SIGTERM)
#   delete    release the TPUs
#
#   --name=N --zone=Z     name and zone of the queued resource
#   --type=T              v5litepod-16, v5p-32, v6e-64, v4-32 ...
#   --version=V           version of the image; default: the one for the type
#   --slices=N            more than one: multi-slice (default 1)
#   --spot                may be preempted, and costs less
#   --project=P           default: gcloud's own
#   --package=P           what pip installs, e.g. 'bertjax[tpu] @ git+https://...'
#   --setup=COMMAND       on every worker after installing, e.g. to fetch a vocabulary:
#                         'gcloud storage cp gs://BUCKET/vocab.txt /tmp/vocab.txt'
#   --poll=SECONDS        seconds between two checks (default 60)
#
# --dry-run prints every command and runs none.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
exec 4>&1  # for commands that a dry run prints where output is taken

dry='' name='' zone='' type='' version='' slices=1 spot='' project='' poll=60 command=''
package='' setup=true
while (($#)); do
  case $1 in
    --dry-run | --dry_run) dry=1 ;;
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
    -*) no_option "$1" ;;
    *) [[ -z $command ]] || die "two commands: $command and $1"; command=$1 ;;
  esac
  shift
done
[[ -n $name ]] || die '--name is missing'
[[ $name =~ ^[a-z][a-z0-9-]*$ ]] || die "--name=$name: small letters, digits and -"
[[ -n $zone ]] || die '--zone is missing'
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices is no number"
[[ $poll =~ ^[0-9]+([.][0-9]+)?$ ]] || die "--poll=$poll is no number of seconds"
where=("--zone=$zone" ${project:+"--project=$project"})

queued() { act gcloud compute tpus queued-resources "$@" "${where[@]}"; }

# Run a command line on every worker of every slice, at the same time.
everywhere() {
  queued ssh "$name" --worker=all --node=all --batch-size=1024 --command="$1"
}

# Print the request's state: ABSENT if there is none, UNKNOWN if gcloud does not say.
state() {
  local look=(describe "$name" '--format=value(state.state)') errors
  if [[ -n $dry ]]; then
    queued "${look[@]}" >&4
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
    *) die "--type=$type: which image? Types with a known one are v4-N, v5litepod-N, \
v5p-N and v6e-N; others need --version (tpu7x: launch/gke_jobset.sh)" ;;
  esac
}

check_type() {
  [[ -n $type ]] || die '--type is missing, e.g. v5litepod-16'
  [[ -n $version ]] || version=$(image) || exit 2
}

create() {
  local nodes=("--node-id=$name") found
  ((slices == 1)) || nodes=("--node-count=$slices" "--node-prefix=$name")
  queued create "$name" "${nodes[@]}" "--accelerator-type=$type" \
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

# There is no default, because anybody may own a name on a package index.
check_package() {
  [[ -n $package ]] || die "--package is missing: 'bertjax[tpu] @ git+https://...'"
}

# The images' own Python may be older than 3.11, so uv installs one. The last file
# marks a complete installation.
install() {
  everywhere "rm -f ~/bertjax/installed; \
curl -LsSf https://astral.sh/uv/install.sh | sh && \
~/.local/bin/uv venv --allow-existing --python 3.12 ~/bertjax && \
~/.local/bin/uv pip install --python ~/bertjax/bin/python $(printf '%q' "$package") && \
bash -c $(printf '%q' "${setup:-true}") && touch ~/bertjax/installed"
}

# Test whether a run is active. Its process id alone may belong to another process now.
at_work="{ [[ ! -e ~/bertjax.status && -s ~/bertjax.pid ]] && \
grep -qs bertjax.train /proc/\$(cat ~/bertjax.pid)/cmdline; }"

# Each worker writes ~/bertjax.log, and ~/bertjax.status when it has ended.
run() {
  everywhere "! $at_work || { echo error: \$(hostname): a run is at work, stop ends it \
>&2; exit 1; }; rm -f ~/bertjax.status; nohup setsid bash -c '\
\"\$@\" >> ~/bertjax.log 2>&1 & echo \$! > ~/bertjax.pid; \
wait \$!; echo \$? > ~/bertjax.status' run \
~/bertjax/bin/python -m bertjax.train --multihost $(printf '%q ' "$@")\
> /dev/null 2>&1 < /dev/null & sleep 1"
}

# Print a worker's name (...-w-INDEX), and its exit status, "running", or 255 if nothing
# was started or the process is gone.
status() {
  everywhere "echo \$(hostname) \$(cat ~/bertjax.status 2> /dev/null || \
{ $at_work && echo running || echo 255; })"
}

# Print the workers' statuses, or "? silent" if one does not answer, because
# gcloud then reports no others.
statuses() {
  local said
  said=$({ status 2> /dev/null || echo '? silent'; } |
    grep -E '^[^ ]+ (running|silent|[0-9]+)$') || true
  echo "${said:-? silent}"
}

# Summarize statuses in a line, such as "1 of A B, 143 of C": by_status LINES.
by_status() {
  awk '$2 ~ /running|[0-9]/ { if (++n[$2] <= 8) names[$2] = names[$2] " " $1 }
    END {
      for (x in n) {
        more = n[x] > 8 ? " and " n[x] - 8 " more" : ""
        print x " of" names[x] more
      }
    }' <<< "$1" | sort | paste -s -d , - | sed 's/,/, /g'
}

is_installed() { everywhere 'test -e ~/bertjax/installed'; }

# Start a run on slices without one: start INSTALLED ... The counts are those of keep.
start() {
  if "$1" || install; then
    uninstalled=0
    if run "${@:2}"; then mine=mine; fi
  else
    ((++uninstalled < 5)) || die "$name: not installed in 5 attempts: --package or \
--setup fails, as the lines above say"
    echo "$name: not installed, trying again" >&2
  fi
}

# A status 0 or 2 of an earlier run with other arguments does not apply to this run, so
# it is started; one that was finished ends at once.
keep() {
  local found each said known='' mine='' looks=0 ends=0 fails=0 silent=0 lost=0
  local uninstalled=0
  if [[ -n $dry ]]; then
    state > /dev/null
    create
    install
    run "$@"
    status
    is_installed                           # before it is started again
    queued delete "$name" --force --quiet  # when it was preempted
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
        each=$(statuses)
        said=$(awk '{ print $2 }' <<< "$each" | sort -u | xargs)
        # If a worker is gone, the others end; while some run, none is lost.
        [[ $said == *silent && $said != *running* ]] || silent=0 lost=0
        case "$mine $said " in
          *' running '*)
            mine=mine
            ((++looks < 30)) || ends=0 ;;
          'mine 0 ' | 'mine 0 silent ') echo "$name: done" >&2; return ;;
          mine*' 2 '*) die "$name: $(by_status "$(grep ' 2$' <<< "$each")"): the config \
or its input is at fault; its log says how" ;;
          *' silent ')  # perhaps it is being preempted
            found=$(by_status "$each")
            echo "$name: a worker does not answer; others: ${found:-none does}" >&2
            explain "$said" >&2
            if ((++silent >= 10)); then
              ((++lost < 5)) || die "$name: not reached by ssh on 5 slices in a row"
              echo "$name: no answer in $silent looks, asking anew" >&2
              silent=0
              queued delete "$name" --force --quiet || true
            fi ;;
          *)
            ((uninstalled || ++ends <= 5)) ||
              die "$name: ended 5 times soon after its start; see logs"
            looks=0
            echo "$name: exit statuses $(by_status "$each"): starting" >&2
            explain "$said" >&2
            start is_installed "$@" ;;
        esac ;;
      FAILED | SUSPENDED)
        echo "$name: $found, asking anew" >&2
        queued delete "$name" --force --quiet || true ;;
      ABSENT)
        if create; then
          fails=0 uninstalled=0
          start false "$@"
        else
          ((++fails < 5)) || die "$name: not begun in 5 attempts; the lines above say why"
        fi ;;
      *) ;;  # waiting, being provisioned or suspended; or gcloud did not say
    esac
    sleep "$poll"
  done
}

case $command in
  create) check_type; create ;;
  install) check_package; install ;;
  run) check_bucket "$@"; run "$@" ;;
  keep) check_bucket "$@"; check_package; check_type; keep "$@" ;;
  status) status ;;
  logs)
    queued ssh "$name" --worker=0 --node=0 --command='tail -n 100 -F ~/bertjax.log' ;;
  stop)
    everywhere "$at_work || { echo error: \$(hostname): no run is at work >&2; \
exit 1; }; kill -TERM \$(cat ~/bertjax.pid)" ;;
  delete) queued delete "$name" --force --quiet ;;
  '') die 'which command? create install run keep logs status stop delete' ;;
  *) die "$command is no command: create install run keep logs status stop delete" ;;
esac
