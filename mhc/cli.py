"""The edge that command-line programs share: arguments, config files with overrides, and errors of one line.

Exit codes: 0 done, 2 a user's mistake, 6 no room to write, 130 interrupted from the keyboard, 141 nobody reads the
result any more (``… | head``), 143 by SIGTERM where a program takes it; a program says when it has others.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mhc import config as config_lib
from mhc import extras, full_disk, remote, stdio
from mhc.config import Config
from mhc.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from ml_collections import ConfigDict

GRID = "grid.json"  # what makes a folder a grid's

_targets: list[str] = []  # what the program in hand is to write


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose complaints are UserErrors."""

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("prog", program())
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and leaving."""
        raise UserError(f"{message} (--help lists the arguments)")

    def options(self) -> list[str]:
        """The long options, for messages."""
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def parse_args(self, args=None, namespace=None):
        """As argparse, with the nearest option for an unknown one. Raises UserError."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest[0])
        return parsed

    def refuse(self, argument: str) -> NoReturn:
        """Raises the UserError for an argument that nothing takes."""
        name = argument.partition("=")[0]
        dashed = name if name.startswith("-") else f"--{name}"
        raise UserError(f"unknown argument {argument}{did_you_mean(dashed.partition('.')[0], self.options())}")


def program() -> str:
    """Return what was typed to start this process: ``train.py``, or ``python -m mhc.train``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def run_main(main: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a program and exit with its code; a UserError becomes ``error: …`` on stderr and code 2, a full disk a line
    and code 6. What a program says on stderr cannot fail it (`mhc.stdio`).

    Args:
        main: takes the command-line arguments without the program's name, gives the exit code.
        arguments: None: ``sys.argv[1:]``.
    """
    _targets.clear()
    try:
        with stdio.guarded() as result:
            code = _code(main, sys.argv[1:] if arguments is None else arguments, result)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stdio.flush_or_discard(stream)
    sys.exit(code)


def _code(main: Callable[[Sequence[str]], int], arguments: Sequence[str], result: stdio.ResultStream) -> int:
    """Run a program; its exit code, or that of the line in which it ends."""
    try:
        with _warnings_as_lines():
            code = main(arguments)
        result.end()
        return code
    except UserError as error:
        return _failed(str(error), full_disk.EXIT_CODE if isinstance(error, full_disk.DiskFull) else 2)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        _leave(128 + (signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT))
    except Exception as error:
        line = full_disk.message(error, _targets)
        if line is None:
            raise
        return _failed(line, full_disk.EXIT_CODE)


def _failed(line: str, code: int) -> int:
    print("error:", " ".join(line.split()), file=sys.stderr)
    return code


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}:", " ".join(record.getMessage().split()), file=sys.stderr)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """What this package logs is ``warning: …``, whatever the libraries have made of logging."""
    logger, handler = logging.getLogger("mhc"), _Lines()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


class _Terminated(KeyboardInterrupt):
    """SIGTERM."""


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM meanwhile is an interrupt from the keyboard, but for the exit code: what is open is closed and cleared.

    For the main thread alone.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(code: int) -> NoReturn:
    """Exits without taking the interpreter down: a compilation that was left behind crashes when that happens."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, stdio.ClosedPipe):  # a pipe whose reader was interrupted as well
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def own_names(fields: Sequence[str]) -> Iterator[None]:
    """A UserError about one of these fields of `data` names the option of the program that has its name.

    A last advice that is about another field is left out.
    """
    try:
        yield
    except UserError as error:
        said = re.sub(rf"(?<![\w/.-])data\.({'|'.join(fields)})\b", r"--\1", str(error))
        raise type(error)(re.sub(r" or ((?! or ).)* data\.\w+$", "", said)) from None


def load_config(path: str, arguments: Sequence[str], parser: Parser) -> Config:
    """The validated Config of a config file and the overrides on the command line.

    Args:
        path: a Python file with ``get_config() -> ConfigDict``; ``file.py:text`` calls ``get_config(text)``.
        arguments: what the parser left over: ``--config.group.field=value`` (or a space for ``=``), nothing else.
        parser: names the options in the complaint about anything else.
    Raises: UserError for a file that cannot be loaded, an unknown or mistyped override, or an invalid config.
    """
    tree = _run_config_file(path).to_dict()
    config_lib.load_kinds(tree)  # the overrides may set options of its kinds
    return _changed(tree, overrides(arguments, parser))


def change(config: Config, arguments: Sequence[str], parser: Parser) -> Config:
    """A resolved Config with the overrides on the command line, by `mhc.config.change`.

    Raises: UserError as `load_config`.
    """
    return config_lib.change(config, overrides(arguments, parser))


def _changed(tree: dict[str, dict[str, Any]], changes: Mapping[str, Any]) -> Config:
    for name, value in changes.items():
        group, _, leaf = name.partition(".")
        tree.setdefault(group, {})[leaf] = value
    return config_lib.from_config_dict(tree)


def overrides(arguments: Sequence[str], parser: Parser) -> dict[str, Any]:
    """``--config.GROUP.FIELD=VALUE`` as {dotted name: value}, each checked as far as one field can be.

    The last of a name counts.

    Raises: UserError for anything else among the arguments, an unknown field, or a value that it may not hold.
    """
    found = {}
    rest = list(arguments)
    config_lib.load_kinds({"residual": {"module": _given(rest, "residual.module")}})
    while rest:
        argument = rest.pop(0)
        flag, equals, text = argument.partition("=")
        match = re.fullmatch(r"--?config\.(.*)", flag)
        if match is None:
            parser.refuse(argument)
        name = match[1]
        meaning = config_lib.describe(name)
        if not equals:
            if not rest:
                raise UserError(f"{flag}: a value is missing: {meaning}")
            text = rest.pop(0)
        found[name] = config_lib.parse_value(name, text)
    return found


def field_lines(group: str) -> list[str]:
    """Return a line for each field of a group ("": of every one): ``group.field = default``, its words, what is
    allowed.

    Raises: UserError for an unknown group.
    """
    known = config_lib.groups()
    if group and group not in known:
        raise UserError(f"--fields: unknown group {group}{did_you_mean(group, known)}; groups: {', '.join(known)}")
    names = [name for name in config_lib.field_names() if not group or name.partition(".")[0] == group]
    return [f"{name} = {config_lib.default_of(name)!r}  # {config_lib.describe(name)}" for name in names]


def _given(arguments: Sequence[str], field: str) -> str | None:
    """Return the last value that the command line gives a field, None where it gives none."""
    value = None
    for number, argument in enumerate(arguments):
        flag, equals, text = argument.partition("=")
        if flag.lstrip("-") == f"config.{field}":
            value = text if equals else next(iter(arguments[number + 1 :]), None)
    return None if value == "None" else value


def _run_config_file(path: str) -> ConfigDict:
    """What the file's get_config gives. Raises UserError with file and line for whatever goes wrong in it."""
    file, colon, text = path.partition(":")
    if not Path(file).is_file():
        siblings = [str(entry) for entry in sorted(Path(file).parent.glob("*.py"))]
        raise UserError(f"config file {file}: no such file{did_you_mean(file, siblings)}")
    extras.require_train(f"config file {file}")
    from ml_collections import ConfigDict

    try:
        get_config = runpy.run_path(file).get("get_config")
        if get_config is None:
            raise UserError(f"config file {file}: it defines no get_config()")
        made = get_config(text) if colon else get_config()
    except SyntaxError as error:
        raise UserError(f"config file {error.filename}, line {error.lineno}: {error.msg}") from None
    except UserError:
        raise
    except Exception as error:  # the file is the user's, and so is whatever it raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of one is quoted
        place = f", line {lines[-1]}" if lines else ""
        raise UserError(f"config file {file}{place}: {type(error).__name__}: {reason}") from None
    if not isinstance(made, ConfigDict):
        raise UserError(
            f"config file {file}: get_config() gives {type(made).__name__}, allowed: ml_collections.ConfigDict"
        )
    return made


def check_writable(folder: str, option: str = "--workdir") -> Path:
    """Return the path of a folder that is there or can be made; makes nothing.

    What is checked here is written later: the program does not end when the reader of its stdout does.

    Raises: UserError where it cannot be written.
    """
    if not folder:
        raise UserError(f"{option}: given '', allowed: the path of a folder, e.g. runs/a")
    if remote.is_remote(folder):  # Path would make a local folder of that name, and what is there would be lost
        raise UserError(f"{option} {folder}: a URL, allowed: the path of a folder")
    path = Path(folder)
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UserError(f"{option} {folder}: {parent} is a file, allowed: a folder that can be written")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: {_why_not(parent)} {parent}")
    _to_be_written(path)
    return path


def _to_be_written(path: Path) -> None:
    """Remember what the program writes, and have it write that whether or not anybody reads its stdout."""
    _targets.append(str(path))
    stdio.keep_going()


def _why_not(folder: Path) -> str:
    """Why a folder cannot be written, up to its name."""
    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return "the file system is read-only at"
    return "no permission to write in"


def check_file(file: str, option: str) -> Path:
    """Return the path of a file that can be written, in a folder that is there. Raises UserError where it cannot.

    As in `check_writable`, the program does not end when the reader of its stdout does.
    """
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option}: cannot write {file}, allowed: a file in a folder that can be written")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{option}: cannot write {file}: {_why_not(path.parent)} {path.parent}")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{option}: cannot write {file}: no permission to write it")
    _to_be_written(path)
    return path


def check_workdir(folder: str) -> remote.Folder:
    """As `check_writable` for a run, whose folder may also be ``gs://BUCKET/PATH``: then the bucket is asked for."""
    if not remote.is_remote(folder):
        path = check_writable(folder)
        if (path / GRID).is_file():
            raise UserError(f"--workdir {folder}: it holds a grid, not a run; name another folder")
        return path
    try:
        path = remote.path(folder)
        if len(path.parts) < 4:  # root, scheme, bucket
            raise UserError(f"{folder}: allowed: gs://BUCKET/PATH, a folder in the bucket")
        remote.check(path)
    except UserError as error:
        raise UserError(f"--workdir {error}") from None
    return path
