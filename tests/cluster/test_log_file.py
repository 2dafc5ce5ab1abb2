"""The file that takes what is said around the terminal."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.config.root import Config
from cluster.serving import serve_command
from cluster.terminal.log_file import LogFile
from cluster.user_error import UserError


def test_whatever_a_process_and_its_children_print_goes_into_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = LogFile(tmp_path / "logs" / "serve.log")
    with file.instead_of_the_terminal() as (out, err):
        os.write(2, b"from C++\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        file.write("ours")
        out.write("for stdout\n")
        err.write("for stderr\n")
    os.write(2, b"after\n")
    file.close()
    assert capfd.readouterr() == ("for stdout\n", "for stderr\nafter\n")
    text = file.path.read_text()
    assert text == "from C++\nfrom a child\nours\n"
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_the_terminal_is_back_after_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = LogFile(tmp_path / "serve.log")
    with pytest.raises(ValueError), file.instead_of_the_terminal():
        raise ValueError
    os.write(2, b"a traceback\n")
    file.close()
    assert capfd.readouterr().err == "a traceback\n"


def test_a_full_file_is_kept_as_the_one_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = LogFile(tmp_path / "serve.log", max_bytes=18)
    with file.instead_of_the_terminal():
        for line in ("first, long enough", "second, long enough", "third"):
            file.write(line)
        os.write(2, b"fourth\n")
    file.close()
    assert file.path.read_text() == "third\nfourth\n"
    assert (tmp_path / "serve.log.1").read_text() == "second, long enough\n"
    assert capfd.readouterr() == ("", "")


def test_where_no_next_file_can_be_begun_the_log_goes_on_when_one_can(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder is removed under a running server, and comes back."""
    folder = tmp_path / "logs"
    file = LogFile(folder / "serve.log", max_bytes=18)
    with file.instead_of_the_terminal():
        shutil.rmtree(folder)
        file.write("first, long enough")
        assert not folder.exists(), "nowhere to begin the next one"
        folder.mkdir()
        file.write("second, lost too: where it went is gone")
        file.write("third")
        os.write(2, b"fourth\n")
    file.close()
    assert file.path.read_text() == "third\nfourth\n"
    assert capfd.readouterr() == ("", "")


def test_a_new_start_keeps_the_log_of_the_last_one(tmp_path: Path) -> None:
    for line in ("one", "two", "three"):
        file = LogFile(tmp_path / "serve.log")
        file.write(line)
        file.close()
    assert file.path.read_text() == "three\n"
    assert (tmp_path / "serve.log.1").read_text() == "two\n"
    file.write("after its end: lost, and no error")


def config(folder: Path, **logging: object) -> Config:
    size = {"kv_capacity_tokens": 4096}
    sections = {"model": {"cache_dir": folder}, "server": {"port": 8123}, "logging": logging}
    return Config.model_validate({**sections, "pools": {"prefill": size, "decode": size}})


def test_where_a_server_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = serve_command._log_file(config(tmp_path / "cache"))
    assert file.path == tmp_path / "cache/logs/serve-8123.log"
    file.close()
    file = serve_command._log_file(config(tmp_path / "cache", file=tmp_path / "own.log"))
    assert file.path == tmp_path / "own.log"
    file.close()
    (tmp_path / "home").touch()  # a home that can't be written to
    file = serve_command._log_file(config(tmp_path / "home" / "cache"))
    assert file.path.name == "serve-8123.log"
    assert file.path.parent.name.startswith("splitserve-")
    file.close()
    with pytest.raises(UserError, match=r"^logging.file: .*own.log can't be written: "):
        serve_command._log_file(config(tmp_path, file=tmp_path / "home" / "own.log"))
