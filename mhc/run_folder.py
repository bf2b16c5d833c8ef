"""Lock the folder of a run against other processes, and mirror a folder that lies in an object store.

A store has no append, no rename and no locks. A run whose folder is there keeps its small files (curves, events,
config, summary) in a local folder and copies each that changed as a whole: see `MirroredFolder`. Its checkpoints go
straight to the store through orbax, whose commit there is a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mhc import full_disk, remote
from mhc.errors import UserError
from mhc.remote import Folder

log = logging.getLogger(__name__)

OWNER = "owner.json"  # describes the run that trains in the folder; its heartbeat is here
LAST = "summary.json"  # copied after everything else: where it says "finished", all of the run is in the store

HEARTBEAT_SECONDS = 20.0  # between two heartbeats of a run
STALE_SECONDS = 120.0  # a run without a heartbeat for so long counts as gone
COPY_SECONDS = 60.0  # least time between two copies of the changed files
COPY_SHARE = 0.02  # largest share of the time that copying may take


@contextlib.contextmanager
def lock(folder: Path, name: Folder | None = None) -> Iterator[None]:
    """Lock a local folder against other processes of this machine; the lock ends with the process, however it ends.

    Args:
      folder: an existing folder.
      name: the folder's name in the message, where it has another.

    Raises:
      UserError: another process holds it.
    """
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{name or folder}: another process is training in this folder") from None
        except OSError:
            log.info("%s: this file system has no locks", folder)
        yield


def open_folder(workdir: str | os.PathLike[str], number: int = 0) -> RunFolder:
    """Return the folder of a run.

    Args:
      workdir: a local path, or gs://BUCKET/PATH.
      number: the number of this process among those of the run.

    Raises:
      UserError: as `mhc.remote.path`.
    """
    place = remote.path(workdir)
    return RunFolder(place) if isinstance(place, Path) else MirroredFolder(place, number)


class RunFolder:
    """Holds a run's local folder, where nothing is copied.

    Attributes:
      place: the folder as the user named it; checkpoints go here.
      files: the local folder of everything else.
    """

    place: Folder
    files: Path

    def __init__(self, place: Path):
        self.place = self.files = place

    def wait_until_free(self) -> None:
        """Wait until no other machine is known to train here. Every process of a run calls this, before `held`."""

    @contextlib.contextmanager
    def held(self, *, writes: bool) -> Iterator[None]:
        """Hold the folder for a run.

        Args:
          writes: whether this is the one process of the run that writes.

        Raises:
          UserError: the folder cannot be made, or another process holds it.
        """
        if not writes:
            yield
            return
        try:
            self.files.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            line = f"{self.place}: the folder cannot be made: {error.strerror}"
            raise full_disk.error_class(error)(line) from None
        with lock(self.files, self.place):
            yield

    def pull(self) -> None:
        """Copy what a run reads from the store to ``files``; a local folder needs no copy."""

    def push(self) -> None:
        """Copy what changed from ``files`` to the store; a local folder needs no copy."""


class MirroredFolder(RunFolder):
    """Holds a run's folder in a store: ``files`` mirrors its small files and is copied back.

    Files that changed since the last copy are copied whole: by `push`, and every minute or so by a thread, which also
    writes a heartbeat into ``OWNER``. Files are never deleted in the store.

    The lock is as good as a file without preconditions can be: if two runs take the folder within the same second, both
    may believe that they hold it until the next heartbeat. Then the one that wrote first stops.

    Attributes:
      due: when the thread copies next, by time.monotonic.
    """

    def __init__(self, place: Folder, number: int = 0):
        """Describe the folder; nothing is asked of the store.

        Args:
          place: the folder in the store.
          number: the number of this process among those of the run, which may share a machine.
        """
        self.place = place
        digest = hashlib.sha256(os.fspath(place).encode()).hexdigest()[:16]
        self._spool = Path(tempfile.gettempdir()) / f"mhc-{os.getuid()}" / f"{digest}-{number}"
        self.files = self._spool / place.name
        self._copied: dict[str, tuple[int, int]] = {}  # file: (time of change, size) when it was copied
        self._copying = threading.Lock()
        self.due = 0.0
        self._end = threading.Event()
        self._lost: str | None = None  # why the folder is no longer ours
        self._us: dict[str, Any] = {}  # what OWNER says of this run

    @contextlib.contextmanager
    def held(self, *, writes: bool) -> Iterator[None]:
        """Hold the folder as `RunFolder.held`; the process that writes copies what changed at the end."""
        base = self._spool.parent
        base.mkdir(mode=0o700, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise UserError(f"{base}: belongs to another user; TMPDIR sets the folder of temporary files")
        self._spool.mkdir(exist_ok=True)
        with lock(self._spool, self.place):
            shutil.rmtree(self.files, ignore_errors=True)  # left by a process that was killed
            self.files.mkdir()
            if writes:
                self._take()
                with self._mirroring():
                    self.pull()
                    yield
            else:
                yield
                shutil.rmtree(self.files, ignore_errors=True)

    @contextlib.contextmanager
    def _mirroring(self) -> Iterator[None]:
        """Copy from time to time and at the end; then free the folder."""
        thread = threading.Thread(target=self._mirror, name="mirror", daemon=True)
        self.due = time.monotonic() + COPY_SECONDS
        thread.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._end.set()
            thread.join()
            try:
                if self._lost is None or not failed:  # else the error on its way out says so
                    self.push()
            except Exception as error:
                if not failed:
                    raise
                log.warning("%s: not copied, %s; the files are in %s", self.place, error, self.files)
            else:
                shutil.rmtree(self.files, ignore_errors=True)
            finally:
                if self._lost is None:
                    with contextlib.suppress(Exception):
                        (self.place / OWNER).unlink()

    def _mirror(self) -> None:
        """Write heartbeats and copy what changed, until the run ends or loses the folder."""
        while not self._end.wait(HEARTBEAT_SECONDS):
            try:
                with self._copying:
                    self._check_ours()
                    self._beat()
                if time.monotonic() >= self.due:
                    self.push()
            except UserError as error:
                log.warning("%s", error)
                if self._lost is not None:
                    return
            except Exception as error:  # a later copy may succeed; the one before a checkpoint must
                log.warning("%s: not copied: %s", self.place, error)

    # Copying ----------------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Copy the files that a run reads from the store; those that the store lacks are removed."""
        remote.fetch(self.place, self.files)
        self._copied = {name: _stamp(self.files / name) for name in remote.FILES if (self.files / name).is_file()}

    def push(self) -> None:
        """Copy the files that changed.

        Raises:
          UserError: another run took the folder. Nothing is written.
        """
        with self._copying:
            began = signed = time.monotonic()
            self._check_ours()
            for name in self._names():
                stamp = _stamp(self.files / name)
                if self._copied.get(name) == stamp:
                    continue
                with (self.files / name).open("rb") as source, (self.place / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 2**22)
                self._copied[name] = stamp
                if time.monotonic() - signed > HEARTBEAT_SECONDS:
                    signed = time.monotonic()
                    self._beat()
            now = time.monotonic()
            self.due = now + max(COPY_SECONDS, (now - began) / COPY_SHARE)

    def _names(self) -> list[str]:
        """Return the names of the files to copy, in the order to copy them."""
        names = []
        for folder, below, files in os.walk(self.files):
            below[:] = [name for name in below if not name.startswith(".")]
            inside = Path(folder).relative_to(self.files)
            names += [(inside / file).as_posix() for file in files if not file.startswith(".")]
        return sorted((name for name in names if not (self.files / name).is_symlink()), key=lambda n: (n == LAST, n))

    # The owner --------------------------------------------------------------------------------------------------------

    def wait_until_free(self) -> None:
        """Return at once if the last heartbeat of another run is older than ``STALE_SECONDS``.

        If it is younger, and the run is not known to be dead, wait for its next heartbeat, or until the run counts as
        gone.

        Raises:
          UserError: the other run is alive.
        """
        remote.check(self.place)
        first, began = self._owner(), time.monotonic()
        if first is None or time.time() - first["time"] > STALE_SECONDS:
            return
        alive = _alive(first)
        last = first
        while alive is None:
            left = STALE_SECONDS - max(time.monotonic() - began, time.time() - first["time"])
            if last is first:
                log.warning("%s: waiting up to %.0f s for %s to be gone", self.place, left, _describe(first))
            if left <= 0:
                return
            time.sleep(min(HEARTBEAT_SECONDS / 4, left))
            now = self._owner()
            if now is None:
                return
            last, alive = now, True if now["beat"] != first["beat"] or now["id"] != first["id"] else None
        if alive:
            raise UserError(
                f"{self.place}: {_describe(last)} is training in this folder; end it first, or remove {OWNER} there"
            )

    def _take(self) -> None:
        """Write this run into ``OWNER``."""
        self._us = {
            "id": uuid.uuid4().hex,
            "host": platform.node(),
            "process": os.getpid(),
            "machine": _machine(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "beat": 0,
        }
        with remote.reporting_refusals(self.place):
            self._beat()

    def _beat(self) -> None:
        self._us |= {"beat": self._us["beat"] + 1, "time": time.time()}
        (self.place / OWNER).write_text(json.dumps(self._us))

    def _owner(self) -> dict[str, Any] | None:
        content = remote.read(self.place / OWNER)
        try:
            return None if content is None else dict(json.loads(content))
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"{self.place / OWNER}: not JSON; remove it where no run is training here") from None

    def _check_ours(self) -> None:
        """Raise UserError where another run took the folder, or a person freed it."""
        if self._lost is None:
            owner = self._owner()
            if owner is None:
                self._lost = f"{OWNER} was removed"
            elif owner["id"] != self._us["id"]:
                self._lost = f"{_describe(owner)} took it"
        if self._lost is not None:
            raise UserError(f"{self.place}: this run stops: it lost its folder: {self._lost}")


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} of {owner['host']}, started {owner['started']},"


def _machine() -> str:
    """Return an id of the scope of process ids, this boot of this machine or container; "" if it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _alive(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner's process is alive, or None where that is not known because it runs elsewhere."""
    if not owner["machine"] or owner["machine"] != _machine():
        return None
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
