"""The Slurm job that this process is the batch script of: its nodes, its end, its steps, and what follows it."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import RunError
from hpc_rl.fault.report import ATTEMPT_VARIABLE
from hpc_rl.fault.scale import Queue
from launch.env import START_VARIABLE, allocation
from launch.hostlist import expand_hosts
from launch.srun_step import SrunStep

ANSWER_TIMEOUT_S = 20.0
GONE = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")  # a node in such a state runs nothing of ours

# A USR1 that comes before a rank listens would end it. It is kept waiting until `StopSignals` lets it in.
HOLD_USR1 = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); os.execv(sys.argv[1], sys.argv[1:])"
)
# On each node: whatever still runs of an attempt is ended, then the node's name is said. $0: the attempt's variable.
CLEAR = """
of_attempt() { grep -lzx "$0" /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\\n'; }
for try in 1 2 3 4 5 6 7 8 9 10; do
    pids=$(of_attempt); [ -n "$pids" ] || break
    kill -9 $pids 2>/dev/null; sleep 0.2
done
[ -n "$(of_attempt)" ] || echo "clear $SLURMD_NODENAME"
"""
# On another node than the batch script's, which would be lost with its node: Slurm keeps a job without its script. $0: the
# job, $1: the script's node, $2: its possible sizes, NODES:TASKS, largest first, $3: its partition, $4: a log, $5: nodes that
# it was submitted with. A requeue waits for what still runs (KillWait), so that is killed, and an update made only if needed.
DEPUTY = """
exec > "$4" 2>&1
until scontrol -o show node "$1" | grep -q State=DOWN; do sleep 2; done  # before that, the job would keep its GPUs
there=$(sinfo -h -r -p "$3" -N -t idle,alloc,mix,comp -o %N | sort -u | grep -vcx "$1")
for size in $2; do [ "${size%:*}" -gt "$there" ] || break; done
echo "$1, where the batch script ran, is lost: requeue on ${size%:*} nodes"
trap "" TERM
for step in $(squeue -h -s -j "$0" -o %i); do [ "$step" = "$0.$SLURM_STEP_ID" ] || scancel --signal=KILL "$step" & done; sleep 1
scontrol requeue "$0" && [ "$there" -lt "$5" ] &&
    scontrol update JobId="$0" ExcNodeList="$1" NumNodes="${size%:*}" NumTasks="${size#*:}"
"""
# A running job's size may not be changed, that of one in the queue may; and a requeue ends what the script has started.
REQUEUE = 'trap "" TERM; scontrol requeue "$0" || exit 3; for try in 1 2 3; do scontrol update JobId="$0" "$@" && exit; done'


@dataclass(frozen=True, slots=True)
class RankCommand:
    """What each rank runs, and how many of them a node has. ``gpus_per_node``: 0 where Slurm counts none."""

    argv: tuple[str, ...]
    ranks_per_node: int
    cpus_per_rank: int
    env: Mapping[str, str]
    gpus_per_node: int = 0


class SlurmJob:
    """The running job, asked through Slurm's own commands.

    Args:
        job_id: SLURM_JOB_ID.
        restart: how often it has been requeued.
        command: of the ranks.
        log_dir: for the deputy's words and the script of a chained job.
        chain_args: what the script of a chained job is called with.
    """

    def __init__(self, job_id: str, restart: int, command: RankCommand, log_dir: Path, chain_args: Sequence[str]):
        self.job_id, self.restart, self.ranks_per_node = job_id, restart, command.ranks_per_node
        self._command, self._log_dir, self._chain_args = command, log_dir, tuple(chain_args)
        self._deputy: tuple[str, subprocess.Popen[bytes]] | None = None

    # ---- what is there ----------------------------------------------------------------------------------------

    def nodes(self) -> tuple[str, ...]:
        """Of the job, without those that Slurm has taken from it."""
        return expand_hosts(self.fields()["NodeList"])

    def fields(self) -> dict[str, str]:
        """``scontrol show job``, as it is."""
        return parse_fields(_ask("scontrol", "-o", "show", "job", self.job_id))

    def ends_at(self) -> float | None:
        """When the time limit ends the job, in seconds since the epoch; None without a limit."""
        return parse_time(self.fields().get("EndTime", ""))

    def down(self, nodes: Sequence[str]) -> set[str]:
        """Those that Slurm knows to be lost. It takes a while to know."""
        lines = _ask("scontrol", "-o", "show", "node", ",".join(nodes)).splitlines()
        found = {fields["NodeName"]: fields["State"] for fields in map(parse_fields, lines) if "NodeName" in fields}
        return {name for name, state in found.items() if set(re.split(r"[+*]", state)) & set(GONE)}

    def answering(self, nodes: Sequence[str], attempt: int) -> set[str]:
        """Ends what is left of an attempt on the nodes; returns those on which nothing of it runs any more."""
        probes = {node: self._probe(node, attempt) for node in nodes}
        end, found = time.monotonic() + ANSWER_TIMEOUT_S, set()
        for node, probe in probes.items():
            try:
                said, _ = probe.communicate(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                probe.kill()
                continue
            if f"clear {node}" in said.splitlines():
                found.add(node)
        return found or set(nodes) - self.down(nodes)  # this script runs on one of them: it is Slurm that did not answer

    def _probe(self, node: str, attempt: int) -> subprocess.Popen[str]:
        argv = [*_one_task(node), "bash", "-c", CLEAR, f"{START_VARIABLE}={self._start_name(attempt)}"]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(argv, env=_without_sizes(), stdout=subprocess.PIPE, text=True, **quiet)

    def has_lost(self, nodes: Iterable[str], timeout_s: float = 60.0) -> bool:
        """Waits until Slurm has taken lost nodes from the job: one that is requeued before keeps GPUs that are not there."""
        end = time.monotonic() + timeout_s
        while set(nodes) & set(self.nodes()):
            if time.monotonic() > end:
                return False
            time.sleep(1.0)
        return True

    def queue(self) -> Queue:
        """Idle nodes of the job's partition, and jobs that wait in it."""
        partition = self.fields()["Partition"]
        idle = _ask("sinfo", "-h", "-p", partition, "-t", "idle", "-N", "-o", "%N").split()
        pending = _ask("squeue", "-h", "-p", partition, "-t", "PD", "-o", "%A").split()
        return Queue(len(set(idle)), len(set(pending) - {self.job_id}))

    def usable_nodes(self, exclude: Iterable[str]) -> int:
        """Nodes of the partition that can ever run this job."""
        lines = _ask("sinfo", "-h", "-p", self.fields()["Partition"], "-N", "-o", "%N %T").splitlines()
        states = dict(line.split() for line in lines)
        bad = ("down", "drain", "fail", "*")
        return len([n for n, state in states.items() if n not in set(exclude) and not any(b in state for b in bad)])

    # ---- what is done -----------------------------------------------------------------------------------------

    def start(self, nodes: Sequence[str], attempt: int, overrides: Sequence[str]) -> SrunStep:
        """The ranks, on these nodes and no others; ``overrides`` after those that the command has."""
        c = self._command
        argv = (*ranks_argv(c, nodes), *overrides)
        names = {ATTEMPT_VARIABLE: str(attempt), START_VARIABLE: self._start_name(attempt)}
        return SrunStep(argv, _without_sizes(keep_gpus=True) | dict(c.env) | names)

    def _start_name(self, attempt: int) -> str:
        return f"{self.job_id}.{self.restart}.{attempt}"

    def guard(self, nodes: Sequence[str], sizes: Sequence[int]) -> None:
        """Has another node watch over this script's own, and put the job back into the queue when it is lost.

        Args:
            nodes: that answer.
            sizes: numbers of nodes that the job may then have.
        """
        fields = self.fields()
        here = fields.get("BatchHost", "")
        others = [node for node in nodes if node != here]
        if self._deputy is not None and (self._deputy[0] in others and self._deputy[1].poll() is None):
            return
        self.dismiss()
        if others:
            tasks = " ".join(f"{n}:{n * self._command.ranks_per_node}" for n in sorted(sizes, reverse=True))
            submitted = str(job.num_nodes if (job := allocation()) else len(nodes))
            script = [DEPUTY, self.job_id, here, tasks, fields["Partition"], str(self._log_dir / "deputy.log"), submitted]
            argv = [*_one_task(others[-1]), "bash", "-c", *script]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
            self._deputy = others[-1], subprocess.Popen(argv, env=_without_sizes(), **quiet)

    def dismiss(self) -> None:
        """Ends the watch of `guard`."""
        if self._deputy is not None:
            self._deputy[1].kill()
            self._deputy[1].wait()
            self._deputy = None

    def requeue(self, num_nodes: int, exclude: Iterable[str]) -> None:
        """Puts the job back into the queue; Slurm ends this process soon after.

        Raises: RunError if Slurm does not allow it.
        """
        before = self.fields().get("ExcNodeList", "(null)")
        bad = set(exclude) | (set(expand_hosts(before)) if before != "(null)" else set())
        argv = ["bash", "-c", REQUEUE, self.job_id, *self._size(num_nodes).split(), *_excluding(bad)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode == 3:
            raise RunError(f"scontrol requeue {self.job_id}: {done.stderr.strip()}")

    def chain(self, num_nodes: int, exclude: Iterable[str]) -> str:
        """Submits the next slice, same script and arguments, to start once this job has ended; returns its id."""
        script = self._log_dir / f"slice_after_{self.job_id}.sh"
        _do("scontrol", "write", "batch_script", self.job_id, str(script))
        fields = self.fields()
        argv = chain_argv(fields, num_nodes, set(exclude), self._command.ranks_per_node)
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
        done = subprocess.run([*argv, str(script), *self._chain_args], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"the next slice could not be submitted: {done.stderr.strip()}")
        return done.stdout.strip().split(";")[0]

    def _size(self, num_nodes: int) -> str:
        # Both ends: a job that was submitted with --nodes=1 has at most one, and an update of the least alone is refused.
        return f"NumNodes={num_nodes}-{num_nodes} NumTasks={num_nodes * self._command.ranks_per_node}"


def ranks_argv(command: RankCommand, nodes: Sequence[str]) -> tuple[str, ...]:
    """The srun of one attempt. ``--overlap``: a step that a lost node keeps in the books must not block the next one."""
    sizes: dict[str, int | str] = {
        "nodes": len(nodes),
        "ntasks": len(nodes) * command.ranks_per_node,
        "ntasks-per-node": command.ranks_per_node,
        "cpus-per-task": command.cpus_per_rank,
        "nodelist": ",".join(nodes),
    }
    if command.gpus_per_node:  # those that came with --exclusive, unasked, a step must ask for
        sizes["gpus-per-node"] = command.gpus_per_node
    common = ("--overlap", "--kill-on-bad-exit=1", "--distribution=block", "--mpi=none", "--export=ALL", "--no-kill")
    options = (f"--{name}={value}" for name, value in sizes.items())
    return ("srun", *options, *common, sys.executable, "-S", "-c", HOLD_USR1, *command.argv)


def chain_argv(
    fields: Mapping[str, str], num_nodes: int, exclude: set[str], ranks_per_node: int
) -> tuple[str, ...]:
    """The sbatch of a job like the one that ``fields`` of `scontrol show job` describe, after its end."""
    wanted = {
        "job-name": fields.get("JobName"),
        "nodes": str(num_nodes),
        "ntasks-per-node": str(ranks_per_node),
        "cpus-per-task": fields.get("CPUs/Task"),
        "time": _limit(fields.get("TimeLimit", "")),
        "partition": fields.get("Partition"),
        "account": fields.get("Account"),
        "qos": fields.get("QOS"),
        "chdir": fields.get("WorkDir"),
        "output": _log_pattern(fields.get("StdOut", ""), fields["JobId"]),
        "exclude": ",".join(sorted(exclude)) or None,
        "dependency": f"afterany:{fields['JobId']}",
    }
    return ("sbatch", "--parsable", *(f"--{k}={v}" for k, v in wanted.items() if v and v not in ("(null)", "N/A")))


def _log_pattern(path: str, job_id: str) -> str | None:
    """The job's number in the file's name is that of the next job there; elsewhere in the path it is a coincidence."""
    directory, _, name = path.rpartition("/")
    name = re.sub(rf"(?<!\d){job_id}(?!\d)", "%j", name)
    return f"{directory}/{name}" if path else None


def _limit(text: str) -> str | None:
    return None if text in ("UNLIMITED", "Partition_Limit", "") else text


def parse_fields(line: str) -> dict[str, str]:
    """``A=1 B=x`` of `scontrol -o show`; a value may hold no blank."""
    return {key: value for key, _, value in (word.partition("=") for word in line.split()) if value}


def parse_time(text: str) -> float | None:
    """``2026-11-30T23:53:08`` in this machine's time zone -> seconds since the epoch; None for Unknown, NONE."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _one_task(node: str) -> list[str]:
    options = ("--overlap", "--mpi=none", "--quiet", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1")
    return ["srun", *options, f"--nodelist={node}"]


def _without_sizes(*, keep_gpus: bool = False) -> dict[str, str]:
    """This environment, without what sbatch has set for the whole job: a step of some of its nodes would contradict."""
    left_out = ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES"]
    left_out += [] if keep_gpus else ["SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"]
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _excluding(nodes: set[str]) -> list[str]:
    return [f"ExcNodeList={','.join(sorted(nodes))}"] if nodes else []


def _ask(*argv: str) -> str:
    """Standard output; empty if the command fails: the controller may be away for a moment."""
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60).stdout


def _do(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RunError(f"{' '.join(argv)}: {done.stderr.strip()}")
