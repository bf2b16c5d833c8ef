"""Read files in object stores (``gs://BUCKET/PATH``), and check that they can be reached."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mhc import extras
from mhc.errors import UserError

if TYPE_CHECKING:
    from etils import epath

Folder: TypeAlias = "Path | epath.Path"  # a local path, or one in a store with (most of) pathlib's methods

# The files of a run that programs read, beside its checkpoints.
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

PATIENCE = 15.0  # seconds that a bucket has to answer


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a store (SCHEME:/…) rather than a local file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)) is not None


def path(text: str | os.PathLike[str]) -> Folder:
    """Return a local path, or one of etils.epath for ``gs://``, without access to the store.

    Raises:
      UserError: the scheme is another, the bucket's name is impossible, or gcsfs is not installed.
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
            raise UserError(f"{text}: gs:// needs {package}: {extras.command('gcs')}")
    import fsspec.config
    from etils import epath

    # A cached listing does not see what other processes wrote.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    for name in ("gcsfs", "google.auth"):  # they log, with tracebacks, what is reported here in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return epath.Path(text)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False


def check(folder: Folder) -> None:
    """Refuse a bucket that cannot be reached within ``PATIENCE`` seconds; a local folder is not checked.

    Raises:
      UserError: no such bucket, no permission, no credentials, or no answer.
    """
    if is_remote(folder):
        _check_bucket(os.fspath(folder).split("/")[2])


@functools.cache  # a bucket that was reached is not asked again; an error is not kept
def _check_bucket(bucket: str) -> None:
    import google.auth.exceptions
    import requests
    from google.api_core import exceptions, retry
    from google.cloud import storage

    try:
        # Orbax asks the same, to know whether the bucket has folders.
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
    except (exceptions.GoogleAPIError, OSError) as error:  # OSError: no project is known
        raise UserError(f"gs://{bucket}: cannot be reached: {error}") from None


@contextlib.contextmanager
def reporting_refusals(place: Folder | str) -> Iterator[None]:
    """Turn the error of a store that denies permission into a UserError.

    Args:
      place: what is read or written, for the message.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # gcsfs raises OSError("Forbidden: …"), or a class of its own with a code
        if not str(error).startswith("Forbidden") and getattr(error, "code", None) not in (401, 403):
            raise
        raise UserError(f"{place}: no permission: {str(error).splitlines()[-1]}") from None


def read(file: Folder) -> bytes | None:
    """Return a file's content, or None where there is none. Raises UserError where the store denies permission."""
    if isinstance(file, Path):
        return file.read_bytes() if file.is_file() else None
    check(file)
    with reporting_refusals(file):
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None


def local_copy(run: str | os.PathLike[str]) -> Path:
    """Return a local run's folder itself, or a temporary folder of the same name with the small files of a remote run.

    The checkpoints stay where they are. Raises UserError as `path` and `check`.
    """
    place = path(run)
    if isinstance(place, Path):
        return place
    check(place)
    folder = Path(tempfile.mkdtemp(prefix="mhc-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = folder / (place.name or "run")
    fetch(place, copy)
    return copy


def fetch(place: Folder, folder: Path) -> None:
    """Copy ``FILES`` from the store into a local folder; files that the store lacks are removed from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        content, file = read(place / name), folder / name
        if content is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
