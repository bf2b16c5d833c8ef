"""Record each start of a run in run.json, so that the run can be started again and compared with others.

    {"format": 1, "config": {…}, "starts": [{"time": …, "step": 0, "command": […], "code": {…}, …}, …]}

``config`` is that of the last start. The flags that make programs on GPUs deterministic are set here too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mhc import config as configs
from mhc import remote
from mhc.config import Config, ModuleError
from mhc.errors import UserError
from mhc.xla_options import unknown_flags

if TYPE_CHECKING:
    from jax.sharding import Mesh

FILE, FORMAT = "run.json", 1
DIFF_LIMIT = 2**18  # bytes of a diff that are kept

PACKAGES = (
    "mhc-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "tokenizers",
    "jax-cuda13-plugin",
    "libtpu",
)
# Environment variables that may change the programs that XLA compiles, or how devices run them.
_PREFIXES = ("XLA_", "JAX_", "LIBTPU_", "NCCL_", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_")
# Options of jax that may change results, however they were set.
_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
# Environment variables that change no result: where compiled programs are kept, which devices exist (``devices`` has
# them), what is logged.
_NO_EFFECT = ("CACHE", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "JAX_TRACEBACK", "JAX_LOG", "NCCL_DEBUG")

_ROOT = Path(__file__).parents[1]


# A start --------------------------------------------------------------------------------------------------------------


def start(config: Config, mesh: Mesh, *, step: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a start of a run in this process, for JSON.

    Args:
      config: the resolved config.
      mesh: the mesh of all processes.
      step: updates done before this start.
      data: hashes of the corpus and the tokeniser.
    """
    import jax

    device = mesh.devices.flat[0]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": list(sys.orig_argv),
        "folder": os.getcwd(),
        "host": platform.node(),
        "config_hash": config_hash(config),
        "code": code(),
        "versions": {"python": platform.python_version(), **versions()},
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": int(mesh.size),
            "mesh": {name: int(size) for name, size in mesh.shape.items()},
            "processes": jax.process_count(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "runtime": device.client.platform_version,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "deterministic": is_deterministic(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIXES)},
        "options": {name: str(getattr(jax.config, name)) for name in _OPTIONS},
        "data": dict(data),
    }


def config_hash(config: Config) -> str:
    """Return the first 16 hex digits of the SHA-256 of a resolved config without ``distributed``."""
    return _hash(configs.to_dict(config))


def _hash(tree: Mapping[str, Any]) -> str:
    tree = {group: fields for group, fields in tree.items() if group != "distributed"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of those of ``PACKAGES`` that are installed."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


@functools.cache  # the source as it was when the process started
def code() -> Mapping[str, Any] | None:
    """Return the git commit of this package's source and what changed since; None outside a repository.

    ``diff`` is that of tracked files, cut at ``DIFF_LIMIT`` bytes. ``untracked`` names the Python files that git does
    not track. ``changes`` is a hash of the uncut diff and of the untracked files.
    """
    return _code(_ROOT)


def _code(root: Path) -> dict[str, Any] | None:
    if _git(root, "ls-files", "--error-unmatch", "mhc/__init__.py") is None:
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:  # no commit yet
        return None
    diff = _git(root, "diff", "HEAD", "--no-ext-diff", "--no-color") or b""
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py") or b""
    untracked = sorted(name.decode(errors="replace") for name in listed.split(b"\0") if name)
    digest = hashlib.sha256(diff)
    for name in untracked:
        digest.update(name.encode() + b"\0")
        if (root / name).is_file():
            digest.update((root / name).read_bytes())
    dirty = bool(diff or untracked)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "changes": digest.hexdigest()[:16] if dirty else None,
        "diff": diff[:DIFF_LIMIT].decode(errors="replace"),
        "diff_cut": len(diff) > DIFF_LIMIT,
        "untracked": untracked[:100],
    }


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return the output of git; None where there is no git, no repository, or the command fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# The file -------------------------------------------------------------------------------------------------------------


def append(file: Path, config: Config, entry: Mapping[str, Any]) -> None:
    """Add a start to a run's run.json, which is made if missing. Raises UserError where it holds something else."""
    from mhc.files import read_json, write_json  # imports numpy, which a user's mistake shall not wait for

    starts = list(_starts(_checked(read_json(file), file), file)) if file.is_file() else []
    write_json(file, {"format": FORMAT, "config": configs.to_dict(config), "starts": [*starts, entry]})


class StoredRun(NamedTuple):
    """Holds the content of a run's run.json, so that another run can be started from it."""

    file: str
    config: Config  # resolved, with the default ``distributed``
    starts: Sequence[Mapping[str, Any]]

    @property
    def deterministic(self) -> bool:
        """Return whether the last start asked for deterministic programs."""
        return bool(self.starts[-1]["deterministic"])


def read(file: str | os.PathLike[str]) -> StoredRun:
    """Read a run.json.

    Args:
      file: RUN/run.json, or the folder RUN, local or in a store.

    Raises:
      UserError: there is no such file, or it is not the run.json of a run.
    """
    place = remote.path(file)
    if place.suffix not in (".json", ".jsonl"):  # a run's .jsonl is not a folder either, and is refused below
        place = place / FILE
    content = remote.read(place)
    if content is None:
        raise UserError(f"{place}: no such file, allowed: RUN/{FILE}, e.g. runs/a/{FILE}")
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{place}: not JSON") from None
    stored = _checked(tree, place)
    try:
        config = configs.from_config_dict({**configs.upgraded(stored["config"]), "distributed": {}})
    except ModuleError as error:
        raise ModuleError(f"{place}: {error}") from None
    except UserError as error:
        raise UserError(f"{place}: {error}; was it written by another version?") from None
    starts = _starts(stored, place)
    if _hash(stored["config"]) != starts[-1]["config_hash"]:
        raise UserError(
            f"{place}: its config is not the one of its last start (the file is damaged, or was edited); allowed: the "
            "file as it was written, and --config.GROUP.FIELD=VALUE to change fields"
        )
    return StoredRun(str(place), config, starts)


def _checked(tree: Any, file: Any) -> Mapping[str, Any]:
    if not isinstance(tree, Mapping) or not isinstance(tree.get("config"), Mapping) or not tree.get("starts"):
        raise UserError(f"{file}: not the {FILE} of a run (it has no config and starts)")
    if tree.get("format") != FORMAT:
        raise UserError(f"{file}: given format {tree.get('format')!r}, allowed: {FORMAT}; another version wrote it")
    return tree


def _starts(tree: Mapping[str, Any], file: Any) -> Sequence[Mapping[str, Any]]:
    for number, entry in enumerate(tree["starts"], start=1):
        try:
            comparable(entry), entry["config_hash"], entry["deterministic"]
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{file}: start number {number} is damaged") from None
    return tree["starts"]


# Differences ----------------------------------------------------------------------------------------------------------


def comparable(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a start that equal runs share, as {readable name: value}."""
    code, devices = entry["code"] or {}, entry["devices"]
    environment = {
        name: _flags(value) if name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") else value
        for name, value in entry["environment"].items()
        if not any(part in name for part in _NO_EFFECT)
    }
    return {
        "commit": code.get("commit"),
        "uncommitted changes": code.get("changes"),
        **entry["versions"],
        "devices": f"{devices['count']} × {devices['kind']}",
        "mesh": ", ".join(f"{name} {size}" for name, size in devices["mesh"].items() if size > 1) or "one device",
        "processes": devices["processes"],
        # Programs of a CPU are split over its cores.
        **({"cores": devices["cores"]} if devices["platform"] == "cpu" else {}),
        "runtime": devices["runtime"],
        "system": devices["system"],
        **environment,
        **entry["options"],
        **entry["data"],
    }


def _flags(text: str) -> str:
    return " ".join(sorted(text.split()))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two starts, as {readable name: (before, after)}."""
    old, new = comparable(before), comparable(after)
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def notes(now: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], origin: StoredRun | None) -> Iterator[str]:
    """Yield lines for the user about a start: what changed, and options that have no effect.

    Args:
      now: this start.
      earlier: the earlier starts of the same run.
      origin: the run that this one was started from, with ``--from``.
    """
    if earlier:
        for name, (before, after) in differences(earlier[-1], now).items():
            yield f"{name}: {_words(before)} at the last start, {_words(after)} now"
    elif origin is not None:
        earlier_values: dict[str, list[str]] = {}
        for start in origin.starts:
            for name, (before, _) in differences(start, now).items():
                earlier_values.setdefault(name, []).append(_words(before))
        values = comparable(now)
        for name, before_words in earlier_values.items():
            before = " and ".join(dict.fromkeys(before_words))
            yield f"{name}: {before} in {origin.file}, {_words(values.get(name))} here"
        if len({start["config_hash"] for start in origin.starts}) > 1:
            yield f"{origin.file}: the config changed between its starts; this run has the last one throughout"
    if now["deterministic"] and now["devices"]["platform"] != "gpu":
        yield (
            f"deterministic: no effect on {now['devices']['platform']}, whose programs are always deterministic; the "
            "flag is for GPUs"
        )


def _words(value: Any) -> str:
    return "none" if value is None else str(value)


# Deterministic programs -----------------------------------------------------------------------------------------------

# With it XLA uses no operation whose result depends on the order of threads, and chooses no kernel by a measured time.
DETERMINISTIC = "--xla_gpu_deterministic_ops"


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask XLA for deterministic programs on GPUs. This must come before jax's first use of a device.

    Raises:
      UserError: XLA_FLAGS asks for the opposite, or the installed XLA does not know the flag.
    """
    given = environment.get("XLA_FLAGS", "")
    if _asked(given) is False:
        raise UserError(f"--deterministic: XLA_FLAGS has {DETERMINISTIC}=false, allowed: true, or one of the two alone")
    if _asked(given) is None:
        flag = f"{DETERMINISTIC}=true"
        if unknown_flags([flag]):
            release = importlib.metadata.version("jaxlib")
            raise UserError(f"--deterministic: the XLA of jaxlib {release} has no {DETERMINISTIC}")
        environment["XLA_FLAGS"] = f"{given} {flag}".strip()


def is_deterministic() -> bool:
    """Return whether XLA was asked for deterministic programs, by `make_deterministic` or by the user's flag."""
    return _asked(os.environ.get("XLA_FLAGS", "")) is True


def _asked(flags: str) -> bool | None:
    """Return the last value of the flag in XLA_FLAGS; None where the flag is absent."""
    values = [flag.partition("=")[2] or "true" for flag in flags.split() if flag.partition("=")[0] == DETERMINISTIC]
    return values[-1].lower() in ("true", "1") if values else None
