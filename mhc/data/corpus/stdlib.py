"""Prepare the embedded corpus: the source files of Python's own standard library.

This is real text that is on every machine. It is prepared once as a TFDS dataset in array_record files, without
TensorFlow and without a download. Left out are tests, whole applications (idlelib, turtledemo, lib2to3), installed
packages, what is generated or a table (encodings, pydoc_data, the build's ``_sysconfigdata``), and distutils, which
newer Pythons lack. Some 400 files and 8 MB are left. A twentieth of the files, by a hash of their names, is the split
``validation``.

The folder's name has Python's version and a hash of the files' names and sizes, so that no two libraries mix.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mhc import full_disk
from mhc.errors import UserError

_TESTS = {"test", "tests", "idle_test"}
_APPLICATIONS = {"idlelib", "turtledemo", "lib2to3", "ensurepip", "distutils"}
_LEFT_OUT = _TESTS | _APPLICATIONS | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
_FORMAT = 1  # raise it when the choice of files or the split changes
_HELD_OUT = 0.05
_log = logging.getLogger(__name__)


def files(root: Path) -> list[str]:
    """Return the files of the corpus below ``root``: sorted relative names with ``/``."""
    names_below = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and path.stat().st_size:
                names_below.append(path.relative_to(root).as_posix())
    return sorted(names_below)


def held_out(name: str) -> bool:
    """Return whether a file belongs to the split ``validation``."""
    score = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return score < _HELD_OUT * 2**64


def prepare(cache: Path, root: Path | None = None) -> Path:
    """Prepare the dataset below ``cache`` unless it is there, and return its folder for tfds.builder_from_directory.

    Processes may do so at the same time: each prepares a folder of its own, and the first to finish renames it.

    Raises:
      UserError: ``cache`` cannot be written, or ``root`` has no source files.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = files(root)
    if not any(map(held_out, names)) or all(map(held_out, names)):
        raise UserError(f"data.source: stdlib: found {len(names)} source file(s) in {root}, too few to hold some out")
    described = repr([(name, (root / name).stat().st_size) for name in names])
    key = hashlib.sha256(described.encode()).hexdigest()[:12]
    final = cache / f"stdlib-{_FORMAT}-python{platform.python_version()}-{key}"
    relative = Path(_builder_class().name, "1.0.0")
    if final.exists():
        return final / relative
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".part-"))
    except OSError as error:
        raise full_disk.error_class(error)(f"data.cache_dir: cannot write to {cache}: {error.strerror}") from None
    try:
        _log.info("preparing the embedded corpus: %d files of %s", len(names), root)
        _build(temporary, root, names)
        temporary.chmod(0o755)
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final / relative


def _build(folder: Path, root: Path, names: list[str]) -> None:
    import tensorflow_datasets as tfds

    builder = _builder_class()(data_dir=folder, file_format="array_record", root=root, names=names)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces itself there, where only results belong
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False, compute_stats="skip")
        )


@functools.cache
def _builder_class() -> Any:
    import tensorflow_datasets as tfds  # half a second that a run on other data need not pay

    class PythonStdlib(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """Holds source files of Python's standard library: features ``name`` and ``text``."""

        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # nothing to look up beside the code; the look-up needs a package that TFDS does not declare

        def __init__(self, *, root: Path, names: list[str], **arguments: Any):
            self._root = root
            self._file_names = names
            super().__init__(**arguments)

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict({"name": tfds.features.Text(), "text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features, description=self.__doc__)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {
                "train": self._generate_examples(held=False),
                "validation": self._generate_examples(held=True),
            }

        def _generate_examples(self, held: bool) -> Iterator[tuple[str, dict[str, str]]]:
            for name in self._file_names:
                if held_out(name) is held:
                    with contextlib.suppress(UnicodeDecodeError):  # a few files are kept in other encodings on purpose
                        text = (self._root / name).read_bytes().decode()
                        yield name, {"name": name, "text": text}

    return PythonStdlib
