"""python3 -m benchmarks.gpu.card_commands --out FOLDER 'CARDS LIMIT_S COMMAND' ...: commands side by side on cards.

    python3 -m benchmarks.gpu.card_commands --out OUT '0 410 python3 -m pytest tests/gpu/test_host_pool.py' \\
        '1 300 python3 -m benchmarks.gpu.campaign ...' '0,1 120 python3 -m benchmarks.gpu.handoff'

Each command of bash sees its cards only, has their share of the cores, finds the packages that `parcels.unpack` has put
there, and begins when those named before it on one of its cards have ended. At its limit it is interrupted and, if that
is not enough, killed with all that it has started. $LEFT_S: seconds until shortly before that. Its output goes to
FOLDER/0.log and so on. $OUT is FOLDER; at the end it has logs and rest.tar.xz: few files come back from a lent machine.
Exits with 1 unless every command did with 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.few_files import few_files
from cluster.serving.child_processes import descendants

_ROOT = Path(__file__).parents[2]
_MARK = "SPLITSERVE_CARD_COMMAND"  # in the environment of all that a command starts, by which it is found
_MOST_KILLING_S = 10.0
_NOISE = " UCX "  # says thousands of times that a process which has ended can't be reached
_TOLD_CHARACTERS = 10_000  # of all logs' ends together


@dataclass(frozen=True, slots=True)
class CardCommand:
    """text: what bash is to do on these cards. number: its place among all, and its log's name."""

    number: int
    cards: tuple[int, ...]
    limit_s: float
    text: str

    @staticmethod
    def of(number: int, text: str) -> CardCommand:
        """Raises ValueError."""
        words = text.split(maxsplit=2)
        if len(words) < 3:
            raise ValueError(f"{text!r} is not CARDS LIMIT_S COMMAND")
        return CardCommand(number, tuple(int(card) for card in words[0].split(",")), float(words[1]), words[2])


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """code: its exit code; None: it was ended at its limit, or there was no time for it."""

    command: CardCommand
    code: int | None
    took_s: float

    def told(self) -> str:
        how = f"exit {self.code}" if self.code is not None else "AT ITS LIMIT" if self.took_s else "NOT BEGUN"
        cards = ",".join(map(str, self.command.cards))
        return f"{self.command.number}: card {cards}, {self.took_s:.0f} s, {how}: {self.command.text}"


@dataclass(frozen=True, slots=True)
class Machine:
    """num_cards: of the machine. cores: that may be used. site: where packages are. limit_s: of everything. grace_s:
    from being interrupted to being killed."""

    num_cards: int
    cores: tuple[int, ...]
    site: Path
    out: Path
    limit_s: float
    grace_s: float = 10.0

    def cores_of(self, cards: Sequence[int]) -> set[int]:
        """The first card has the first ones, and so on: those are on its side of the machine."""
        each = len(self.cores) // self.num_cards
        if not each:
            return set(self.cores)
        return {core for card in cards for core in self.cores[card * each : (card + 1) * each]}

    def environment(self, command: CardCommand, left_s: float) -> dict[str, str]:
        return os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, command.cards)),
            "PYTHONPATH": f"{self.site}:{_ROOT}",
            "RAY_AUTH_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "OUT": str(self.out),
            "LEFT_S": str(max(1, int(left_s) - 5)),
            _MARK: f"{os.getpid()}-{command.number}",
        }

    def log_of(self, command: CardCommand) -> Path:
        return self.out / f"{command.number}.log"


def run_all(commands: Sequence[CardCommand], machine: Machine) -> list[CommandEnd]:
    """Blocks until all have ended, or limits have. Writes logs."""
    end_s = time.monotonic() + machine.limit_s
    over = [threading.Event() for _ in commands]

    def one(command: CardCommand) -> CommandEnd:
        try:
            for earlier in commands[: command.number]:
                if set(earlier.cards) & set(command.cards):
                    over[earlier.number].wait()
            return _run(command, machine, min(command.limit_s, end_s - time.monotonic()))
        finally:
            over[command.number].set()

    with ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(one, commands))


def _run(command: CardCommand, machine: Machine, limit_s: float) -> CommandEnd:
    if limit_s <= 0.0:
        return CommandEnd(command, None, 0.0)
    started_s = time.monotonic()
    environment = machine.environment(command, limit_s)
    os.sched_setaffinity(0, machine.cores_of(command.cards))  # of this thread, and so of what it starts
    with machine.log_of(command).open("wb") as log:
        process = subprocess.Popen(
            ["env", "--default-signal=INT", "bash", "-c", command.text],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, cwd=_ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _interrupt(process, machine.grace_s)
        _kill_rest(process, environment[_MARK])
    return CommandEnd(command, code, time.monotonic() - started_s)


def _interrupt(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """A campaign keeps what it has, pytest says what has passed: also where we were started to ignore interrupts."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)


def _kill_rest(process: subprocess.Popen[bytes], mark: str) -> None:
    """Until nothing is left, which may hold a card's memory; what the system can't end goes with the machine."""
    end_s = time.monotonic() + _MOST_KILLING_S
    while (pids := _all_of(process, mark)) and time.monotonic() < end_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _all_of(process: subprocess.Popen[bytes], mark: str) -> set[int]:
    """Marked processes, and theirs: one that gave itself a title may have written it over the mark."""
    found = {process.pid} if process.poll() is None else set()  # asked, it does not stay as a zombie either
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and f"{_MARK}={mark}".encode() in _environment(folder).split(b"\0"):
            found.add(int(folder.name))
    return found.union(*(descendants(pid) for pid in found))


def _environment(folder: Path) -> bytes:
    """Nothing: it has ended, or is somebody else's."""
    try:
        return (folder / "environ").read_bytes()
    except OSError:
        return b""


def _end_of(log: Path, num_characters: int) -> str:
    if not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if _NOISE not in line]
    return "\n".join(lines)[-num_characters:]


def _num_cards(commands: Sequence[CardCommand]) -> int:
    named = 1 + max(card for command in commands for card in command.cards)
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return named
    return max(named, len(listed.splitlines()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", metavar="'CARDS LIMIT_S COMMAND'")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all of it: logs are packed before a call ends")
    parser.add_argument("--site", type=Path, default=Path("/tmp/site"))
    options = parser.parse_args()
    try:
        commands = [CardCommand.of(number, text) for number, text in enumerate(options.commands)]
    except ValueError as error:
        parser.error(str(error))
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"{out} is not empty")
    cores = tuple(sorted(os.sched_getaffinity(0)))
    machine = Machine(_num_cards(commands), cores, options.site, out, options.limit_s)
    ends = run_all(commands, machine)
    for end in ends:
        print(f"\n==== {end.told()}\n{_end_of(machine.log_of(end.command), _TOLD_CHARACTERS // len(ends))}")
    few_files(out)
    print("\n" + "\n".join(end.told() for end in ends), flush=True)
    return 0 if all(end.code == 0 for end in ends) else 1


if __name__ == "__main__":
    raise SystemExit(main())
