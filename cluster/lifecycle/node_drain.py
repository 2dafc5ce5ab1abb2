"""`python -m` this: empties this machine's Ray node before it goes. The preStop hook of worker pods.

Kubernetes kills a pod's processes once this returns, or at the end of the grace period, which is longer. Ray Serve
starts replicas elsewhere for those on a draining node, and when these have come, or as long before the deadline as a
drain may take, stops the old ones, which end their requests first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_REPLICA_TITLE = b"ray::ServeReplica"
_ASK_TIMEOUT_S = 30.0
_POLL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Blocks until the node has no replica or time is up. Returns 0 when it has none."""
    arguments = _parser().parse_args(argv)
    begun_s = time.monotonic()
    not_before_s = begun_s + arguments.delay_s
    whole_s = arguments.timeout_s + arguments.replacement_s
    reason = ask_to_drain(whole_s, arguments.node_id)
    if reason:
        print(f"splitserve: Ray does not drain this node: {reason}", file=sys.stderr)
    # Nobody starts replacements then, as when a whole cluster is deleted: what has begun may end, no more.
    deadline_s = begun_s + (arguments.timeout_s if reason else whole_s)
    is_empty = wait_until(lambda: not replica_pids(), deadline_s, time.monotonic, time.sleep)
    time.sleep(max(0.0, not_before_s - time.monotonic()))
    return 0 if is_empty else 1


def ask_to_drain(timeout_s: float, node_id: str | None = None) -> str | None:
    """Have Ray place nothing new here and move away what is here. node_id: hex, default this node's.

    Returns why it does not, or None. Blocks for some seconds, and no longer than 30.
    """
    # Only a preemption is granted while the node is in use.
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is being deleted"]
    command += ["--deadline-remaining-seconds", str(int(timeout_s))]
    command += ["--node-id", node_id] if node_id else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(_ASK_TIMEOUT_S, timeout_s))
    except subprocess.TimeoutExpired:
        return "the head does not answer"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def replica_pids(proc: Path = Path("/proc")) -> list[int]:
    """Processes of Serve replicas in this container; not those of other pods, which hostPID lets one see."""
    here = _mount_namespace(proc / "self")
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            is_replica = (folder / "cmdline").read_bytes().startswith(_REPLICA_TITLE)
        except OSError:
            continue  # it has ended
        if is_replica and _mount_namespace(folder) == here:
            found.append(int(folder.name))
    return found


def _mount_namespace(folder: Path) -> str | None:
    try:
        return str((folder / "ns" / "mnt").readlink())
    except OSError:
        return None  # another user's process


def wait_until(
    is_done: Callable[[], bool], deadline_s: float, now: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    """Whether it came true before the deadline, which is on the clock of `now`."""
    while not is_done():
        if now() >= deadline_s:
            return False
        sleep(_POLL_S)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.lifecycle.node_drain", description=__doc__)
    parser.add_argument(
        "--timeout-s", type=float, required=True, help="longest wait for replicas to end, once they are stopped"
    )
    parser.add_argument("--replacement-s", type=float, default=0.0, help="longest wait for others to start elsewhere")
    parser.add_argument("--delay-s", type=float, default=0.0, help="shortest time before it returns")
    parser.add_argument("--node-id", help="Ray's id of the node; default: this one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
