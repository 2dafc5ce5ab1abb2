"""Run a command where there is no network but loopback: `python tests/loopback_only.py COMMAND...`.

Ray binds several of its ports to all interfaces, whatever node address it is given. In a network namespace of
its own that is loopback and nothing else. Where the system allows no namespace (some containers, macOS) the
command runs as it is, and this says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def enter_network_namespace() -> None:
    """Leave the network but for a loopback interface. Raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWNET if uid == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if uid != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP, b""))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def main(command: list[str]) -> None:
    try:
        enter_network_namespace()
    except (OSError, AttributeError) as error:
        sys.stderr.write(f"loopback_only: no network namespace ({error}); running with the network there is\n")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
