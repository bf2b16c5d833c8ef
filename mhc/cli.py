"""Do what all command-line programs share: arguments, config files with overrides, exit codes, errors of one line.

Exit codes: 0 done, 2 a user's mistake, 6 a full disk, 130 interrupted from the keyboard, 141 nobody reads the result
any more (``… | head``), 143 ended by SIGTERM, where the program handles it. A program that has further codes
documents them.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mhc import config as config_lib
from mhc import extras, full_disk, python_files, remote, stdio
from mhc.config import Config
from mhc.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from ml_collections import ConfigDict

GRID = "grid.json"  # the file that makes a folder a grid

EVERY_FIELD = ("",)  # the `fields` of a program that takes every field of a config

_targets: list[str] = []  # paths that the running program is to write

# Arguments ------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parses arguments as argparse does, without abbreviations; its complaints are UserErrors.

    Attributes:
      example: command lines that work, which ``--help`` shows.
      fields: config fields that ``--config.NAME=VALUE`` may change: dotted names, or groups that end in a dot.
    """

    def __init__(self, *, example: str | Sequence[str], fields: Sequence[str] = (), **arguments: Any) -> None:
        """Describe a program.

        Args:
          example: a command line, or several; ``{prog}`` stands for what starts the program.
          fields: the config fields that the program takes; `EVERY_FIELD`: all of them.
          arguments: those of argparse.ArgumentParser.
        """
        arguments.setdefault("prog", program())
        super().__init__(allow_abbrev=False, **arguments)
        lines = [example] if isinstance(example, str) else example
        self.example = tuple(line.replace("{prog}", self.prog) for line in lines)
        self.fields = tuple(fields)

    def format_help(self) -> str:
        """Return the help of argparse, the config fields and the example below it."""
        sections = [super().format_help().rstrip("\n")]
        if self.fields:
            words = textwrap.fill(
                self._field_words(), 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
            )
            sections.append(f"config fields:\n{words}")
        if self.example:
            title = "example" if len(self.example) == 1 else "examples"
            sections.append(f"{title}:\n" + "\n".join(f"  {line}" for line in self.example))
        return "\n\n".join(sections) + "\n"

    def takes(self, name: str) -> bool:
        """Return whether a field, by its dotted name, is among ``fields``."""
        return any(name.startswith(entry) if entry[-1:] in ("", ".") else name == entry for entry in self.fields)

    def _field_words(self) -> str:
        if self.fields == EVERY_FIELD:
            return "--config.GROUP.FIELD=VALUE changes a field; python -m mhc.train --fields lists and explains them"
        return f"only {allowed_fields(self.fields)} may be changed; python -m mhc.train --fields explains them"

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage and exiting."""
        raise UserError(f"{message} (--help lists the arguments)")

    def options(self) -> list[str]:
        """Return the long options, for messages."""
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def parse_args(self, args=None, namespace=None):
        """Parse arguments as argparse does. Raises UserError, with the nearest option for an unknown one."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest[0])
        return parsed

    def refuse(self, argument: str) -> NoReturn:
        """Raise the UserError for an unknown argument."""
        name = argument.partition("=")[0]
        dashed = name if name.startswith("-") else f"--{name}"
        raise UserError(f"unknown argument {argument}{did_you_mean(dashed.partition('.')[0], self.options())}")


def program() -> str:
    """Return the command that started this process: ``python train.py``, or ``python -m mhc.train``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        name = Path(sys.argv[0]).name
        return f"python {name}" if name.endswith(".py") else name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def allowed_fields(fields: Sequence[str]) -> str:
    """Return the options that set config fields: ``--config.{mesh,data}.*, --config.model.dtype``."""
    groups = [name.removesuffix(".") for name in fields if name.endswith(".")]
    options = [f"--config.{groups[0] if len(groups) == 1 else '{' + ','.join(groups) + '}'}.*"] if groups else []
    return ", ".join([*options, *(f"--config.{name}" for name in fields if not name.endswith("."))])


@contextlib.contextmanager
def naming_options(fields: Sequence[str]) -> Iterator[None]:
    """Let a UserError about a field of `data` name the program's option of that name instead.

    Advice at the end of the message is left out if it is about another field.

    Args:
      fields: the fields of `data` that are options of the program.
    """
    try:
        yield
    except UserError as error:
        message = re.sub(rf"(?<![\w/.-])data\.({'|'.join(fields)})\b", r"--\1", str(error))
        raise type(error)(re.sub(r" or ((?! or ).)* data\.\w+$", "", message)) from None


# Running a program ----------------------------------------------------------------------------------------------------


def run_main(main: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a program and exit with its code.

    A UserError becomes ``error: …`` on stderr and code 2; a full disk becomes one such line and code 6. A stderr that
    cannot be written does not end the program (`mhc.stdio`).

    Args:
      main: takes the command-line arguments without the program's name, returns the exit code.
      arguments: the arguments; None: ``sys.argv[1:]``.
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
    """Run a program; return its exit code, or that of the error that it ends with."""
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
        if line is not None:
            return _failed(line, full_disk.EXIT_CODE)
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # a path given by the user
            return _failed(f"{error.filename}: {error.strerror}", 2)
        raise


def _failed(line: str, code: int) -> int:
    print("error:", " ".join(line.split()), file=sys.stderr)
    return code


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}:", " ".join(record.getMessage().split()), file=sys.stderr)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print what this package logs as ``warning: …``, however libraries have configured logging."""
    logger, handler = logging.getLogger("mhc"), _Lines()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


class _Terminated(KeyboardInterrupt):
    """Stands for SIGTERM."""


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM as an interrupt from the keyboard, so that open files are closed; the exit code differs.

    This works in the main thread alone.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(code: int) -> NoReturn:
    """Exit without shutting the interpreter down, which crashes while a compilation runs in the background."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may have been interrupted as well.
        with contextlib.suppress(OSError, ValueError, stdio.ClosedPipe):
            stream.flush()
    os._exit(code)


# Configs --------------------------------------------------------------------------------------------------------------


def load_config(path: str, arguments: Sequence[str], parser: Parser | None = None) -> Config:
    """Return the validated Config of a config file and the overrides on the command line.

    Args:
      path: a Python file with ``get_config() -> ConfigDict``, where ``file.py:text`` calls ``get_config(text)``; or the
        ``config.json`` of a run.
      arguments: what the parser left over: ``--config.group.field=value`` (or a space for ``=``), nothing else.
      parser: that of the program, for messages; None: the caller is no program, and every field may be changed.

    Raises:
      UserError: a file that cannot be loaded, an unknown or mistyped override, or an invalid config.
    """
    parser = parser or Parser(example=(), fields=EVERY_FIELD)
    if path.endswith(".json"):
        return override(_read_config(path), arguments, parser)
    tree = _run_config_file(path).to_dict()
    config_lib.load_kinds(tree)  # the overrides may set options of its kinds
    for name, value in overrides(arguments, parser).items():
        group, _, leaf = name.partition(".")
        tree.setdefault(group, {})[leaf] = value
    return config_lib.from_config_dict(tree)


def override(config: Config, arguments: Sequence[str], parser: Parser) -> Config:
    """Return a resolved Config with the overrides on the command line, by `mhc.config.change`.

    Raises:
      UserError: as `load_config`.
    """
    return config_lib.change(config, overrides(arguments, parser))


def overrides(
    arguments: Sequence[str], parser: Parser, otherwise: str = "this program does not take it"
) -> dict[str, Any]:
    """Return ``--config.GROUP.FIELD=VALUE`` as {dotted name: value}, each checked as far as one field can be.

    The last value of a field counts.

    Args:
      arguments: what the parser left over.
      parser: names the options in messages, and says which fields the program takes.
      otherwise: the reason for refusing a field that is not among them.

    Raises:
      UserError: anything else stands among the arguments, a field is unknown or not taken, or a value is not allowed.
    """
    values = {}
    rest = list(arguments)
    config_lib.load_kinds({"residual": {"module": _last_value(rest, "residual.module")}})
    while rest:
        argument = rest.pop(0)
        flag, equals, text = argument.partition("=")
        match = re.fullmatch(r"--?config\.(.*)", flag)
        if match is None:
            parser.refuse(argument)
        name = match[1]
        meaning = config_lib.describe(name)
        if not parser.fields:
            raise UserError(f"--config.{name}: this program takes no config fields")
        if not parser.takes(name):
            raise UserError(f"--config.{name}: {otherwise}; allowed: {allowed_fields(parser.fields)}")
        if not equals:
            if not rest:
                raise UserError(f"{flag}: a value is missing: {meaning}")
            text = rest.pop(0)
        values[name] = config_lib.parse_value(name, text)
    return values


def _last_value(arguments: Sequence[str], field: str) -> str | None:
    """Return the last value that the command line gives a field, None where it gives none."""
    value = None
    for number, argument in enumerate(arguments):
        flag, equals, text = argument.partition("=")
        if flag.lstrip("-") == f"config.{field}":
            value = text if equals else next(iter(arguments[number + 1 :]), None)
    return None if value == "None" else value


def field_lines(group: str) -> list[str]:
    """Return a line for each field of a group: ``group.field = default``, its meaning, and what is allowed.

    Args:
      group: the group's name; "": every group.

    Raises:
      UserError: the group is unknown.
    """
    known = config_lib.groups()
    if group and group not in known:
        raise UserError(f"--fields: unknown group {group}{did_you_mean(group, known)}; groups: {', '.join(known)}")
    names = [name for name in config_lib.field_names() if not group or name.partition(".")[0] == group]
    return [f"{name} = {config_lib.default_of(name)!r}  # {config_lib.describe(name)}" for name in names]


def _read_config(path: str) -> Config:
    """Return the Config that a run stored. Raises UserError with the file for whatever is wrong with it."""
    siblings = [str(entry) for entry in sorted(Path(path).parent.glob("*.json"))]
    if not Path(path).is_file():
        raise UserError(f"config file {path}: no such file{did_you_mean(path, siblings)}")
    try:
        return config_lib.from_json(Path(path).read_text("utf-8"))
    except (UserError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"config file {path}: {error}") from None


def _run_config_file(path: str) -> ConfigDict:
    """Return what the file's get_config returns. Raises UserError with file and line for whatever goes wrong in it."""
    file = path.partition(":")[0]
    try:
        from ml_collections import ConfigDict
    except ModuleNotFoundError:
        extras.require_train(f"config file {file}")
        raise
    siblings = [str(entry) for entry in sorted(Path(file).parent.glob("*.py"))]
    config = python_files.result_of(path, "get_config", "config", near=siblings)
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"config file {file}: get_config() gives {type(config).__name__}, allowed: ml_collections.ConfigDict"
        )
    return config


# Paths that are written -----------------------------------------------------------------------------------------------


def check_writable(folder: str, option: str = "--workdir") -> Path:
    """Check that a folder can be written, without making it, and return its path.

    A program that checks a folder here writes it later, so it no longer ends when nobody reads its stdout.

    Args:
      folder: the folder, as the user named it.
      option: the option that names it, for messages.

    Raises:
      UserError: the folder cannot be written.
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
    _will_write(path)
    return path


def check_file(file: str, option: str) -> Path:
    """Check that a file can be written, in a folder that exists, and return its path.

    As in `check_writable`, the program no longer ends when nobody reads its stdout.

    Args:
      file: the file, as the user named it.
      option: the option that names it, for messages.

    Raises:
      UserError: the file cannot be written.
    """
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option}: cannot write {file}, allowed: a file in a folder that can be written")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{option}: cannot write {file}: {_why_not(path.parent)} {path.parent}")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{option}: cannot write {file}: no permission to write it")
    _will_write(path)
    return path


def check_workdir(folder: str) -> remote.Folder:
    """Check that a run's folder can be written, and return its path: a local one, or ``gs://BUCKET/PATH``.

    Raises:
      UserError: the folder cannot be written, holds a grid, or the bucket cannot be reached.
    """
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


def _will_write(path: Path) -> None:
    """Record what the program will write, and let the program go on if nobody reads its stdout."""
    _targets.append(str(path))
    stdio.keep_going()


def _why_not(folder: Path) -> str:
    """Return why a folder cannot be written, as the part of a sentence that its name ends."""
    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return "the file system is read-only at"
    return "no permission to write in"
