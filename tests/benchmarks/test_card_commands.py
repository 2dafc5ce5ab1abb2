"""Commands side by side on cards: each has its own, its limit and its log; at a limit nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.campaign import NAMES
from benchmarks.gpu.card_commands import CardCommand, Machine, run_all
from benchmarks.gpu.few_files import MOST_FILES, REST, few_files

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "half_hour.sh"


def machine(out: Path, limit_s: float = 400.0) -> Machine:
    return Machine(2, tuple(sorted(os.sched_getaffinity(0))), Path("/some/site"), out, limit_s, grace_s=3.0)


def commands(*texts: str) -> list[CardCommand]:
    return [CardCommand.of(number, text) for number, text in enumerate(texts)]


def is_running(pid: int) -> bool:
    """A zombie is not: whether its parent asks for it is not ours to say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went between opening and reading
        return False


def test_each_sees_its_cards_and_finds_packages(tmp_path: Path) -> None:
    told = "echo $CUDA_VISIBLE_DEVICES $PYTHONPATH $RAY_AUTH_MODE $HF_HUB_OFFLINE $OUT $LEFT_S; taskset -pc $$"
    ends = run_all(commands(f"0 140 {told}", f"1 130 {told}", f"0,1 120 {told}"), machine(tmp_path))
    assert [end.code for end in ends] == [0, 0, 0]
    each = machine(tmp_path)
    for end, cards, left in zip(ends, ("0", "1", "0,1"), (135, 125, 115), strict=True):
        first, second = each.log_of(end.command).read_text().splitlines()
        assert first == f"{cards} /some/site:{ROOT} disabled 1 {tmp_path} {left}"
        used = second.rpartition(": ")[2]
        mine = sorted(each.cores_of(end.command.cards))
        assert used in (",".join(map(str, mine)), f"{mine[0]}-{mine[-1]}")


def test_cores_are_divided_among_cards() -> None:
    two = Machine(2, tuple(range(32)), Path(), Path(), 1.0)
    assert two.cores_of((0,)) == set(range(16))
    assert two.cores_of((1,)) == set(range(16, 32))
    assert two.cores_of((0, 1)) == set(range(32))
    assert Machine(4, (3, 5), Path(), Path(), 1.0).cores_of((2,)) == {3, 5}, "too few to divide"


def test_on_one_card_they_run_one_after_another_in_their_order(tmp_path: Path) -> None:
    """The first one waits for what the one on the other card writes: they do run side by side."""
    first = "until [ -e $OUT/other ]; do sleep 0.02; done; echo first >> $OUT/order"
    texts = (f"0 50 {first}", "1 50 touch $OUT/other", "0,1 50 echo both >> $OUT/order", "1 50 echo last >> $OUT/order")
    ends = run_all(commands(*texts), machine(tmp_path))
    assert [end.code for end in ends] == [0, 0, 0, 0]
    assert (tmp_path / "order").read_text() == "first\nboth\nlast\n"


def test_exit_codes_are_told(tmp_path: Path) -> None:
    ends = run_all(commands("0 50 echo out; echo err >&2; exit 3", "0 50 true"), machine(tmp_path))
    assert [end.code for end in ends] == [3, 0]
    assert "exit 3: echo out" in ends[0].told()
    assert (tmp_path / "0.log").read_text() == "out\nerr\n"


LIMIT_S, GRACE_S = 40.0, 120.0


class Ready(subprocess.Popen[bytes]):
    """Its limit is over once it has written that it is ready, and its grace at once, if it holds out for ever."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._log, self._is_stubborn = Path(named["stdout"].name), "trap '' INT" in arguments[0][-1]

    def wait(self, timeout: float | None = None) -> int:
        if timeout == LIMIT_S:
            while "ready" not in self._log.read_text():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired("bash", timeout)
        if timeout == GRACE_S and self._is_stubborn:
            raise subprocess.TimeoutExpired("bash", timeout)
        return super().wait(timeout)


@pytest.fixture(params=["interrupts are heard", "interrupts are ignored"])
def _started(request: pytest.FixtureRequest) -> Iterator[None]:
    """As shells start what runs in the background: its children inherit that it ignores interrupts."""
    before = signal.getsignal(signal.SIGINT)
    if request.param == "interrupts are ignored":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_started")
def test_at_its_limit_it_is_interrupted_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends when it is interrupted, and one that does not, with a child that has left its session and its
    parent, and one that has no environment."""
    orderly = "trap 'echo kept; exit 5' INT; sleep 1000 & echo ready; wait"
    stubborn = "trap '' INT; (setsid sleep 1001 & echo $! > $OUT/orphan); env -i sleep 1002 & echo $! > $OUT/bare; "
    stubborn += "echo ready; wait"
    monkeypatch.setattr("benchmarks.gpu.card_commands.subprocess.Popen", Ready)
    on_two = replace(machine(tmp_path), limit_s=1000.0, grace_s=GRACE_S)
    ends = run_all(commands(f"0 {LIMIT_S} {orderly}", f"1 {LIMIT_S} {stubborn}", "1 50 echo next"), on_two)
    assert [end.code for end in ends] == [None, None, 0]
    assert "AT ITS LIMIT" in ends[0].told()
    assert (tmp_path / "0.log").read_text() == "ready\nkept\n"
    assert not is_running(int((tmp_path / "orphan").read_text()))
    assert not is_running(int((tmp_path / "bare").read_text()))


def test_what_there_is_no_time_for_is_not_begun(tmp_path: Path) -> None:
    (end,) = run_all(commands("0 50 touch $OUT/begun"), machine(tmp_path, limit_s=0.0))
    assert end.code is None
    assert "NOT BEGUN" in end.told()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["0 50", "zero 50 true", "0 soon true", ""])
def test_what_is_no_command_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CardCommand.of(0, text)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.card_commands", *words], capture_output=True, text=True, cwd=ROOT
    )


def test_the_command_prints_ends_of_logs_and_leaves_few_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    noise = "for i in 1 2 3; do echo '[1.2] [host:1:0] sock.c:1 UCX  ERROR sendmsg'; done"
    done = call(
        "--out", str(out), f"0 50 {noise}; mkdir $OUT/a; echo {{}} > $OUT/a/state.jsonl; echo end", "1 50 exit 4"
    )
    assert done.returncode == 1
    assert "==== 0: card 0, " in done.stdout
    assert "\nend\n" in done.stdout
    assert " UCX " not in done.stdout.replace(noise, "")
    assert "exit 4: exit 4" in done.stdout.splitlines()[-1]
    assert sorted(path.name for path in out.iterdir()) == ["0.log", "1.log", REST]
    with tarfile.open(out / REST) as tar:
        assert tar.extractfile("a/state.jsonl").read() == b"{}\n"  # type: ignore[union-attr]
    assert call("--out", str(out), "0 50 true").returncode == 2, "what lies there is not overwritten"
    assert call("--out", str(tmp_path / "other"), "0 50 true").returncode == 0


def test_many_logs_travel_in_the_archive(tmp_path: Path) -> None:
    for number in range(MOST_FILES):
        (tmp_path / f"{number}.log").write_text(f"{number}\n")
    few_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [REST]
    with tarfile.open(tmp_path / REST) as tar:
        assert sorted(tar.getnames()) == [f"{number}.log" for number in range(MOST_FILES)]


def test_of_a_long_log_the_end_stays(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_bytes(b"begin" + bytes(16 << 20) + b"end")
    few_files(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size == 15 << 20
    assert left.read_bytes().endswith(b"\0end")


@pytest.fixture
def on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What python3 is asked for by a script is written there, a word a line; nothing of it is done."""
    asked = tmp_path / "asked"
    python3 = tmp_path / "bin" / "python3"
    python3.parent.mkdir()
    python3.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {asked}\n')
    python3.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python3.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return asked


@pytest.mark.parametrize("call", ["one-card", "one-card-vllm", "pairs", "saturated", "vllm"])
def test_the_next_half_hour_asks_for_what_there_is(call: str, on_a_machine: Path) -> None:
    subprocess.run(["bash", SCRIPT, call], check=True)
    unpacked, _, ran = on_a_machine.read_text().partition("benchmarks.gpu.card_commands\n")
    assert "--needs\nsite\n" in unpacked
    _, _, _, limit_s, *texts = ran.splitlines()
    assert float(limit_s) <= 570.0, "a call ends after 600 s"
    for command in commands(*texts):
        assert command.limit_s <= float(limit_s)
        assert set(command.cards) <= {0, 1}
        for file in re.findall(r"tests/\S+", command.text):
            assert (ROOT / file).is_file()
        for names in re.findall(r"--only (\S+)", command.text):
            assert set(names.split(",")) <= set(NAMES)
        assert ("pytest" in command.text) + ("$LEFT_S" in command.text) == 1, "a campaign knows its time"
    pieces = ",".join(re.findall(r"--only (\S+)", ran))
    assert ("vllm" in pieces) == ("\nvllm\n" in unpacked), "who measures it needs it"
    assert ("\nmodel\n" in unpacked) == ("killed" in ran), "who serves the bundled model needs it"


def test_no_such_half_hour(on_a_machine: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, "all"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2, "one-card, one-card-vllm, pairs, saturated or vllm, not all\n"
    )  # fmt: skip
    assert not on_a_machine.exists()
