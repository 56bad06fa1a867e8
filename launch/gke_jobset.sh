#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A run on TPUs of a GKE cluster, as a JobSet (docs/tpu.md): a job per slice, a pod per
# host. If a pod is lost, all are restarted and the run resumes.
#
#   launch/gke_jobset.sh [--dry-run] OPTIONS COMMAND [-- ARGUMENTS OF bertjax.train]
#
#   run     submit it            logs    follow the first pod
#   state   pods and restarts    delete  end it (SIGTERM: the step is saved first)
#
#   --name=N              name of the JobSet
#   --image=I             a container image with bertjax[tpu] installed
#   --accelerator=A       tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice ...
#   --topology=T          topology of a slice: 4x4, 2x2x2 ...
#   --chips=N             chips per host (default 4)
#   --slices=N            more than one: multi-slice (default 1)
#   --spot                use spot nodes
#   --restarts=N          restarts at most (default 100)
#
# --dry-run prints the commands and the JobSet, and runs nothing. The cluster needs a
# TPU node pool of that accelerator and topology, and the JobSet controller.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

dry='' name='' image='' accelerator='' topology='' chips=4 slices=1 spot='' restarts=100
command=''
while (($#)); do
  case $1 in
    --dry-run | --dry_run) dry=1 ;;
    --name=*) name=${1#*=} ;;
    --image=*) image=${1#*=} ;;
    --accelerator=*) accelerator=${1#*=} ;;
    --topology=*) topology=${1#*=} ;;
    --chips=*) chips=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    --spot) spot=1 ;;
    --restarts=*) restarts=${1#*=} ;;
    -h | --help) sed -n '3,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
    --) shift; break ;;
    -*) no_option "$1" ;;
    *) [[ -z $command ]] || die "two commands: $command and $1"; command=$1 ;;
  esac
  shift
done
[[ -n $name ]] || die '--name is missing'
[[ $name =~ ^[a-z]([-a-z0-9]{0,51}[a-z0-9])?$ ]] ||
  die "--name=$name: small letters, digits and -, as Kubernetes has them"
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices is no number above 0"
[[ $chips =~ ^[1-9]$ ]] || die "--chips=$chips is not in [1, 9]"
[[ $restarts =~ ^(0|[1-9][0-9]*)$ ]] || die "--restarts=$restarts is no number"
for option in image accelerator; do
  [[ ${!option} != *[[:space:]]* ]] || die "--$option has spaces in it"
done

# Check for slices that GKE has; larger three-dimensional ones are multiples of 4.
check_slice() {
  local shapes four='([48]|[2468][048]|[13579][26])'
  case $accelerator in
    tpu-v5-lite-podslice | tpu-v6e-slice) shapes='1x1|2x2|[24]x4|[48]x8|(8|16)x16' ;;
    tpu-v4-podslice | tpu-v5p-slice | tpu7x)
      shapes="2x2x[124]|2x4x4|${four}x${four}x$four" ;;
    *) die "--accelerator=$accelerator is none of tpu-v4-podslice \
tpu-v5-lite-podslice tpu-v5p-slice tpu-v6e-slice tpu7x" ;;
  esac
  [[ $topology =~ ^($shapes)$ ]] ||
    die "--topology=$topology is no slice of $accelerator: e.g. 4x4 (v5e, v6e), 2x2x2"
}

# Print the JobSet; "$@" are the arguments of bertjax.train.
jobset() {
  local hosts argument all=1
  for argument in ${topology//x/ }; do all=$((all * argument)); done
  ((all % chips == 0)) || die "--chips=$chips does not divide the $all of $topology"
  hosts=$((all / chips))
  cat << END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $restarts
    rules:
    - action: FailJobSet  # exit status 2: the config or its input is at fault
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: slice
    replicas: $slices
    template:
      spec:
        parallelism: $hosts
        completions: $hosts
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: train, operator: In, values: [2]}
        template:
          spec:
            restartPolicy: Never
            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet
            terminationGracePeriodSeconds: 60
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $accelerator
              cloud.google.com/gke-tpu-topology: $topology
END
  if [[ -n $spot ]]; then
    cat << END
              cloud.google.com/gke-spot: "true"
            tolerations:
            - key: cloud.google.com/gke-spot
              operator: Equal
              value: "true"
              effect: NoSchedule
END
  fi
  cat << END
            containers:
            - name: train
              image: $image
              ports: [{containerPort: 8471}, {containerPort: 8080}]
              securityContext: {privileged: true}
              resources: {limits: {google.com/tpu: $chips}}
              command: [python, -m, bertjax.train]
              args:
              - --multihost
END
  for argument in "$@"; do
    printf "              - '%s'\n" "${argument//\'/\'\'}"
  done
}

pods="jobset.sigs.k8s.io/jobset-name=$name"
first="jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
case $command in
  run)
    [[ -n $image ]] || die '--image is missing'
    [[ -n $accelerator ]] || die '--accelerator is missing, e.g. tpu-v5-lite-podslice'
    check_slice
    check_bucket "$@"
    [[ $* != *[$'\n\r']* ]] || die 'a line break among the arguments of bertjax.train'
    manifest=$(jobset "$@")
    act kubectl apply -f - <<< "$manifest"
    [[ -z $dry ]] || echo "$manifest" ;;
  state)
    act kubectl get jobset "$name"
    act kubectl get pods --selector="$pods" -o wide ;;
  logs)
    act kubectl logs --follow --tail=100 --selector="$pods,$first" ;;
  delete) act kubectl delete jobset "$name" ;;
  '') die 'which command? run logs state delete' ;;
  *) die "$command is no command: run logs state delete" ;;
esac
