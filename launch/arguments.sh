# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Functions of all launchers, sourced after their `set -euo pipefail`.

die() { echo "error: $*" >&2; exit 2; }

# Refuse an argument that is no option, and say how the option is written.
no_option() {
  case $1 in
    --config* | --workdir*) die "$1 goes to bertjax.train: it follows --" ;;
    --*)  # grep without -q reads to the end, so that sed does not get SIGPIPE
      ! sed '/^set /q' "$0" | grep -F -- " $1=" > /dev/null ||
        die "$1 has no value: write $1=VALUE" ;;
  esac
  die "$1 is no option of $0 (--help lists them)"
}

# Explain status 134 (SIGABRT) if it is among the statuses of the hosts.
explain() {
  [[ " $* " != *' 134 '* ]] ||
    echo "status 134: host 0 or its connection is gone: jax's service ran there, and \
aborts the others; where host 0 is well, the log says what aborted"
}

# Run a command; under --dry-run ($dry) print it, quoted for a shell.
act() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    command -v "$1" > /dev/null || die "$1 is not installed here"
    "$@"
  fi
}

# Print the value of a flag among the arguments of bertjax.train: value FLAG ARGUMENTS.
# A word that looks like the next flag is not a value.
value() {
  local flag=$1 found=''
  shift
  while (($#)); do
    case $1 in
      "--$flag="* | "-$flag="*) found=${1#*=} ;;
      "--$flag" | "-$flag") found=${2-} found=${found##-*} ;;
    esac
    shift
  done
  echo "$found"
}

# Refuse arguments here that bertjax.train would refuse on machines that cost money.
check() {
  local flag word
  for word in "$@"; do
    [[ $word != --dry-run ]] || die '--dry-run goes before --'
  done
  (($#)) || die 'the arguments of bertjax.train are missing, after --'
  for flag in config workdir; do
    [[ -n $(value $flag "$@") ]] ||
      die "--$flag=... is missing among the arguments of bertjax.train, after --"
  done
}

# The same, for machines that lose their disks.
check_bucket() {
  check "$@"
  [[ $(value workdir "$@") == gs://?* ]] ||
    die "--workdir=$(value workdir "$@") is lost with the machines: gs://BUCKET/NAME"
}
