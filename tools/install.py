"""Install this project into the environment of the Python that runs it, and say how far the install is.

    .venv/bin/python tools/install.py '.[train]'

pip prints hundreds of lines or nothing. This prints one line that moves: packages found, megabytes downloaded, packages
installed. If pip fails, its last lines follow. Exit codes: pip's, 130 interrupted from the keyboard.
"""

from __future__ import annotations

import collections
import queue
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
TAIL = 25  # lines of pip that are shown where it fails
EVERY_SECONDS = 15.0  # where nobody sees a line move: in a log

_UNITS = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}  # megabytes


class Progress:
    """Reports how far pip has come, by what it prints and by the packages that lie in the environment."""

    def __init__(self, packages: Path):
        self._packages = packages
        self._before = set(self._installed())
        self._found: set[str] = set()
        self._megabytes = 0.0
        self._total = 0  # packages that are to be installed; 0: not known yet

    def hear(self, line: str) -> None:
        """Take a line that pip printed."""
        if match := re.match(r"\s*Collecting ([\w.-]+)", line):
            self._found.add(match[1])
        elif match := re.match(r"\s*Downloading \S+\.(?:whl|tar\.gz|zip) \(([\d.]+) (kB|MB|GB)\)", line):
            self._megabytes += float(match[1]) * _UNITS[match[2]]
        elif line.startswith("Installing collected packages:"):
            self._total = line.count(",") + 1

    def words(self) -> str:
        """Return the line: ``41 packages found, 230 MB downloaded``, later ``12 of 76 packages installed``."""
        if self._total:
            done = len(set(self._installed()) - self._before)
            return f"{min(done, self._total)} of {self._total} packages installed"
        if not self._found:
            return "looking for packages"
        downloaded = f", {self._megabytes:.0f} MB downloaded" if self._megabytes >= 1 else ""
        return f"{len(self._found)} packages found{downloaded}"

    def _installed(self) -> Iterator[str]:
        return (path.name for path in self._packages.glob("*.dist-info"))


def main(requirement: str) -> int:
    """Install a requirement, editable. Returns the exit code of pip."""
    progress = Progress(Path(sysconfig.get_path("purelib")))
    command = [sys.executable, *PIP, "--editable", requirement]
    start = time.monotonic()
    tail: collections.deque[str] = collections.deque(maxlen=TAIL)
    lines: queue.Queue[str | None] = queue.Queue()
    moving = sys.stdout.isatty()
    wait, shown = (0.5 if moving else EVERY_SECONDS), start
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    ) as pip:
        assert pip.stdout is not None
        threading.Thread(target=_read, args=(pip.stdout, lines), daemon=True).start()
        try:
            running = True
            while running:
                try:
                    line = lines.get(timeout=max(0.0, shown + wait - time.monotonic()))
                    running = line is not None
                    if line is not None:
                        tail.append(line)
                        progress.hear(line)
                except queue.Empty:
                    shown = time.monotonic()
                    _show(f"   {_clock(shown - start)}  {progress.words()}", moving)
            code = pip.wait()
        except KeyboardInterrupt:  # pip was interrupted as well
            code = 130
    if moving:
        _show("", moving)
    if code:
        sys.stderr.write("".join(f"{line}\n" for line in tail))
        sys.stderr.write(f"error: pip could not install {requirement} (exit code {code})\n")
        return code
    print(f"   {_clock(time.monotonic() - start)}  installed")
    return 0


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip())
    lines.put(None)


def _show(line: str, moving: bool) -> None:
    if moving:
        sys.stdout.write(f"\r\x1b[K{line}")
    else:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/install.py REQUIREMENT, e.g. '.[train]'")
    sys.exit(main(sys.argv[1]))
