"""Run folders in an object store (``gs://bucket/path``), which has no append, no rename and no locks.

A run there keeps its small files (curves, events, config, summary) in a local folder and copies each that changed as a
whole: see `Mirror`. Its checkpoints go straight there through orbax, whose commit in a store is a file of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mhc import full_disk
from mhc.errors import UserError

if TYPE_CHECKING:
    from etils import epath

log = logging.getLogger(__name__)

Folder: TypeAlias = "Path | epath.Path"  # a local path, or one in a store with (most of) pathlib's methods

# What reads a run reads these, beside its checkpoints.
FILES = (
    "config.json",
    "run.json",
    "corpus.json",
    "metrics.jsonl",
    "probes.jsonl",
    "events.jsonl",
    "train.log",
    "summary.json",
    "wandb/id",
)
OWNER = "owner.json"  # who trains in the folder
LAST = "summary.json"  # copied after everything else: where it says "finished", all of the run is there

BEAT = 20.0  # seconds between two signs of life of a run
STALE = 120.0  # without one for so long it counts as gone
PUSH = 60.0  # seconds between two copies of what changed, at least
SHARE = 0.02  # of the time that copying may take
PATIENCE = 15.0  # seconds to find out whether a bucket can be reached


# Paths ----------------------------------------------------------------------------------------------------------------


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a store (SCHEME:/…) rather than a local file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)) is not None


def path(text: str | os.PathLike[str]) -> Folder:
    """A local path, or one of etils.epath for ``gs://``. Nothing is asked of the store.

    Raises:
      UserError: another scheme, no bucket's name, or gcsfs is not installed.
    """
    if not is_remote(text):
        return Path(text)
    text = os.fspath(text)
    if not text.startswith("gs://"):
        near = "; did you mean gs://…?" if text.startswith("gs:") else ""
        raise UserError(f"{text}: allowed: a local path, or gs://BUCKET/PATH{near}")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?", text):
        raise UserError(f"{text}: no name of a bucket, allowed: gs://BUCKET/PATH")
    for package in ("gcsfs", "google.cloud.storage"):
        if not _installed(package):
            raise UserError(f"{text}: gs:// needs {package}: pip install 'mhc-jax[gcs]'")
    import fsspec.config
    from etils import epath

    # A cached listing does not see what other processes wrote.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    for name in ("gcsfs", "google.auth"):  # they log, with tracebacks, what is said in a line here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return epath.Path(text)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False


def check(folder: Folder) -> None:
    """Refuse a bucket that cannot be reached, within ``PATIENCE`` seconds. Of a local folder nothing is asked.

    Raises:
      UserError: no such bucket, no permission, no credentials, or no answer.
    """
    if is_remote(folder):
        _check_bucket(os.fspath(folder).split("/")[2])


@functools.cache  # of what went well
def _check_bucket(bucket: str) -> None:
    import google.auth.exceptions
    import requests
    from google.api_core import exceptions, retry
    from google.cloud import storage

    try:
        # What orbax asks too, to know whether the bucket has folders.
        storage.Client().get_bucket(bucket, timeout=PATIENCE, retry=retry.Retry(initial=0.5, timeout=PATIENCE))
    except exceptions.NotFound:
        raise UserError(f"gs://{bucket}: no such bucket") from None
    except (exceptions.Forbidden, exceptions.Unauthorized) as error:
        raise UserError(
            f"gs://{bucket}: no permission: the account needs storage.buckets.get and the roles of an object user: "
            f"{error.message}"
        ) from None
    except google.auth.exceptions.GoogleAuthError as error:
        raise UserError(f"gs://{bucket}: no credentials (gcloud auth application-default login): {error}") from None
    except (exceptions.RetryError, requests.RequestException) as error:
        first = str(error).splitlines()[0][:200]
        raise UserError(f"gs://{bucket}: no answer within {PATIENCE:.0f} s: {first}") from None
    except (exceptions.GoogleAPIError, OSError) as error:  # the second: no project is known
        raise UserError(f"gs://{bucket}: cannot be asked: {error}") from None


@contextlib.contextmanager
def plainly(place: Folder | str) -> Iterator[None]:
    """Says in a UserError's line that the store forbids something."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # gcsfs: OSError("Forbidden: …"), or its own class with a code
        if not str(error).startswith("Forbidden") and getattr(error, "code", None) not in (401, 403):
            raise
        raise UserError(f"{place}: no permission: {str(error).splitlines()[-1]}") from None


def read(file: Folder) -> bytes | None:
    """A file's content; None where there is none. Raises UserError where the store forbids it."""
    if isinstance(file, Path):
        return file.read_bytes() if file.is_file() else None
    check(file)
    with plainly(file):
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None


def local_copy(run: str | os.PathLike[str]) -> Path:
    """A run's own folder where it is local, else a temporary one of the same name with its small files as of now.

    The checkpoints stay where they are. Raises UserError as `path` and `check`.
    """
    place = path(run)
    if isinstance(place, Path):
        return place
    check(place)
    folder = Path(tempfile.mkdtemp(prefix="mhc-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = folder / (place.name or "run")
    _fetch(place, copy)
    return copy


def _fetch(place: Folder, folder: Path) -> None:
    """Copy ``FILES`` out of the store; those that it lacks are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        content, file = read(place / name), folder / name
        if content is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)


# Where a run lives ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(folder: Path, name: Folder | None = None) -> Iterator[None]:
    """Holds a local folder against other processes of this machine; the lock ends with the process, however it ends.

    Args:
      name: of the folder in the message, where it has another.

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


class Home:
    """A run's folder, a local one: nothing is copied.

    Attributes:
      place: the folder, as the user named it; checkpoints go here.
      files: the local folder of everything else.
    """

    place: Folder
    files: Path

    def __init__(self, place: Path):
        self.place = self.files = place

    def wait_until_free(self) -> None:
        """Until no other machine is known to train here. Every process of a run calls this, before `held`."""

    @contextlib.contextmanager
    def held(self, *, writes: bool) -> Iterator[None]:
        """Holds the folder for a run.

        Args:
          writes: by this process, the one of the run that writes.

        Raises:
          UserError: it cannot be made, or is held already.
        """
        if not writes:
            yield
            return
        try:
            self.files.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise full_disk.error_class(error)(f"{self.place}: the folder cannot be made: {error.strerror}") from None
        with lock(self.files, self.place):
            yield

    def pull(self) -> None:
        """What a run reads is as the store has it."""

    def push(self) -> None:
        """The store has every change so far."""


class Mirror(Home):
    """A run's folder in a store: ``files`` is a copy of its small files, which is copied back.

    Files that changed since the last copy are copied whole: by `push`, and every minute or so by a thread, which also
    leaves signs of life in ``OWNER``. Files are never deleted in the store.

    The lock is as good as a file without preconditions can be: of two runs that take the folder within the same second
    both may think it theirs, until the next sign of life; then the one that wrote first stops.

    Attributes:
      due: when the thread copies next, by time.monotonic.
    """

    def __init__(self, place: Folder, number: int = 0):
        """``number``: of this process among those of the run, which may share a machine."""
        self.place = place
        digest = hashlib.sha256(os.fspath(place).encode()).hexdigest()[:16]
        self._spool = Path(tempfile.gettempdir()) / f"mhc-{os.getuid()}" / f"{digest}-{number}"
        self.files = self._spool / place.name
        self._copied: dict[str, tuple[int, int]] = {}  # file: (time of change, size) when it was copied
        self._copying = threading.Lock()
        self.due = 0.0
        self._end = threading.Event()
        self._taken: str | None = None  # by whom, once the folder is no longer ours
        self._us: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------------- its owner

    def wait_until_free(self) -> None:
        """Returns at once where no run left a sign of life for ``STALE`` seconds.

        Where one did, and is not known to be dead, this waits: until its next one, or until it counts as gone.

        Raises:
          UserError: it is alive.
        """
        check(self.place)
        first, began = self._owner(), time.monotonic()
        if first is None or time.time() - first["time"] > STALE:
            return
        alive = _alive(first)
        last = first
        while alive is None:
            left = STALE - max(time.monotonic() - began, time.time() - first["time"])
            if last is first:
                log.warning("%s: waiting up to %.0f s for %s to be gone", self.place, left, _who(first))
            if left <= 0:
                return
            time.sleep(min(BEAT / 4, left))
            now = self._owner()
            if now is None:
                return
            last, alive = now, True if now["beat"] != first["beat"] or now["id"] != first["id"] else None
        if alive:
            raise UserError(
                f"{self.place}: {_who(last)} is training in this folder; end it first, or remove {OWNER} there"
            )

    @contextlib.contextmanager
    def held(self, *, writes: bool) -> Iterator[None]:
        """As `Home.held`; the process that writes copies what changed at the end."""
        base = self._spool.parent
        base.mkdir(mode=0o700, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise UserError(f"{base}: belongs to another user; TMPDIR says where temporary files go")
        self._spool.mkdir(exist_ok=True)
        with lock(self._spool, self.place):
            shutil.rmtree(self.files, ignore_errors=True)  # left by a process that was killed
            self.files.mkdir()
            if writes:
                self._take()
                with self._kept():
                    self.pull()
                    yield
            else:
                yield
                shutil.rmtree(self.files, ignore_errors=True)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Copies from time to time, and at the end; then the folder is free."""
        thread = threading.Thread(target=self._keep, name="mirror", daemon=True)
        self.due = time.monotonic() + PUSH
        thread.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._end.set()
            thread.join()
            try:
                if self._taken is None or not failed:  # else it is being said
                    self.push()
            except Exception as error:
                if not failed:
                    raise
                log.warning("%s: not copied, %s; the files are in %s", self.place, error, self.files)
            else:
                shutil.rmtree(self.files, ignore_errors=True)
            finally:
                if self._taken is None:
                    with contextlib.suppress(Exception):
                        (self.place / OWNER).unlink()

    def _take(self) -> None:
        self._us = {
            "id": uuid.uuid4().hex,
            "host": platform.node(),
            "process": os.getpid(),
            "machine": _machine(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "beat": 0,
        }
        with plainly(self.place):
            self._sign()

    def _sign(self) -> None:
        self._us |= {"beat": self._us["beat"] + 1, "time": time.time()}
        (self.place / OWNER).write_text(json.dumps(self._us))

    def _owner(self) -> dict[str, Any] | None:
        content = read(self.place / OWNER)
        try:
            return None if content is None else dict(json.loads(content))
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"{self.place / OWNER}: not JSON; remove it where no run is training here") from None

    def _check_ours(self) -> None:
        """Raises UserError where another run took the folder, or a person freed it."""
        if self._taken is None:
            owner = self._owner()
            if owner is None:
                self._taken = f"{OWNER} was removed"
            elif owner["id"] != self._us["id"]:
                self._taken = f"{_who(owner)} took it"
        if self._taken is not None:
            raise UserError(f"{self.place}: this run stops: the folder is no longer its own: {self._taken}")

    # --------------------------------------------------------------------------------------------------------- copying

    def pull(self) -> None:
        _fetch(self.place, self.files)
        self._copied = {name: _stamp(self.files / name) for name in FILES if (self.files / name).is_file()}

    def push(self) -> None:
        """Copy the files that changed.

        Raises:
          UserError: the folder was taken over. Nothing is written.
        """
        with self._copying:
            began = signed = time.monotonic()
            self._check_ours()
            for name in self._files():
                stamp = _stamp(self.files / name)
                if self._copied.get(name) == stamp:
                    continue
                with (self.files / name).open("rb") as source, (self.place / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 2**22)
                self._copied[name] = stamp
                if time.monotonic() - signed > BEAT:
                    signed = time.monotonic()
                    self._sign()
            now = time.monotonic()
            self.due = now + max(PUSH, (now - began) / SHARE)

    def _files(self) -> list[str]:
        """Names of the files to copy, in the order to copy them."""
        found = []
        for folder, below, names in os.walk(self.files):
            below[:] = [name for name in below if not name.startswith(".")]
            at = Path(folder).relative_to(self.files)
            found += [(at / name).as_posix() for name in names if not name.startswith(".")]
        return sorted((name for name in found if not (self.files / name).is_symlink()), key=lambda n: (n == LAST, n))

    def _keep(self) -> None:
        while not self._end.wait(BEAT):
            try:
                with self._copying:
                    self._check_ours()
                    self._sign()
                if time.monotonic() >= self.due:
                    self.push()
            except UserError as error:
                log.warning("%s", error)
                if self._taken is not None:
                    return
            except Exception as error:  # the next time may be better; before a checkpoint it must be
                log.warning("%s: not copied: %s", self.place, error)


def home(workdir: str | os.PathLike[str], number: int = 0) -> Home:
    """A run's folder. ``number``: of this process among those of the run. Raises UserError as `path`."""
    place = path(workdir)
    return Home(place) if isinstance(place, Path) else Mirror(place, number)


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


def _who(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} of {owner['host']}, started {owner['started']},"


def _machine() -> str:
    """Where process ids mean the same: this boot of this machine, this container; empty where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner's process lives; None: not known, it runs elsewhere."""
    if not owner["machine"] or owner["machine"] != _machine():
        return None
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
