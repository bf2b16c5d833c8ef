"""Test every program: its help has an example that it takes, and names the config fields that it may change."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mhc import cli
from mhc.errors import UserError

ROOT = Path(__file__).parents[1]
# What a program calls that takes a command line. Help of several parts, such as mhc.grid's, is looked at by part.
STARTS = ("cli.run_main(", "ArgumentParser(")
PARTS = {"mhc.grid": ("", "run", "status", "retry", "collect")}


def programs() -> list[str]:
    """Return the modules that can be started, as ``python -m`` names them."""
    files = [ROOT / "train.py"]
    for top in ("mhc", "eval", "tpu", "bench", "tools"):
        files += sorted((ROOT / top).rglob("*.py"))
    names = []
    for file in files:
        text = file.read_text("utf-8")
        if '__name__ == "__main__"' in text and any(start in text for start in STARTS):
            names.append(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    return names


PROGRAMS = [(name, part) for name in programs() for part in PARTS.get(name, ("",))]
each_program = pytest.mark.parametrize(("name", "part"), PROGRAMS)


class Parsed(Exception):
    """Ends a program once its command line has been parsed."""

    def __init__(self, parser: argparse.ArgumentParser):
        super().__init__()
        self.parser = parser


def main_of(name: str) -> Callable[[Sequence[str]], Any]:
    """Return the function that takes the command line of a program."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    main: Callable[[Sequence[str]], Any] = module.main
    return main


def start_of(name: str) -> str:
    """Return the command that starts a program."""
    return f"python {name.replace('.', '/')}.py" if name in ("train", "tools.against") else f"python -m {name}"


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], str]:
    """Return a function that returns the help of a program, or of a part."""

    def text(name: str, part: str) -> str:
        monkeypatch.setattr(cli, "program", lambda: start_of(name))
        with contextlib.suppress(SystemExit):
            main_of(name)([*part.split(), "--help"])
        return capsys.readouterr().out

    return text


def examples(text: str) -> list[str]:
    """Return the command lines below ``example:``."""
    match = re.search(r"^examples?:\n((?:  \S.*\n)+)", text, re.MULTILINE)
    return [] if match is None else match[1].split("\n  ")


def parse(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Give a program its arguments and end it when they are parsed. Raises UserError where it refuses them."""
    original = argparse.ArgumentParser.parse_known_args

    def and_end(self: argparse.ArgumentParser, *given: Any) -> Any:
        _, rest = original(self, *given)
        if isinstance(self, cli.Parser):
            cli.overrides(rest, self)
        raise Parsed(self)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", and_end)
        with pytest.raises(Parsed) as end:
            main_of(name)(arguments)
    return end.value.parser


def test_the_programs_are_found() -> None:
    expected = {"train", "mhc.train", "mhc.grid", "mhc.data.prepare", "eval.compare", "tpu.compile_ahead"}
    assert expected <= set(programs())


@each_program
def test_its_help_has_an_example_that_it_takes(
    name: str, part: str, help_of: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    lines = examples(help_of(name, part))
    assert lines
    start = start_of(name).split()
    for line in lines:
        words = shlex.split(line)
        assert words[: len(start)] == start
        assert not part or words[len(start)] == part
        parse(name, words[len(start) :], monkeypatch)
        assert all((ROOT / word).is_file() for word in words if re.fullmatch(r"configs/\S+\.py", word))


@each_program
def test_its_help_names_the_fields_that_it_takes(
    name: str, part: str, help_of: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of(name, part)
    line = examples(text)[0]
    parser = parse(name, shlex.split(line)[len(start_of(name).split()) :], monkeypatch)
    if not isinstance(parser, cli.Parser):
        return
    takes = "config fields:" in text
    assert takes == bool(parser.fields) or not part
    for field in ("mesh.data", "model.width", "train.steps"):
        if parser.takes(field):
            assert cli.overrides([f"--config.{field}=1"], parser) == {field: 1}
        elif takes:
            with pytest.raises(UserError, match=rf"--config\.{field}: .*allowed: --config\."):
                cli.overrides([f"--config.{field}=1"], parser)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("mesh.",), "--config.mesh.*"),
        (("mesh.", "data."), "--config.{mesh,data}.*"),
        (("mesh.", "data.", "model.dtype"), "--config.{mesh,data}.*, --config.model.dtype"),
        (("model.dtype",), "--config.model.dtype"),
    ],
)
def test_fields_in_words(fields: tuple[str, ...], words: str) -> None:
    assert cli.allowed_fields(fields) == words
    parser = cli.Parser(example="x", fields=fields)
    assert " ".join(parser.format_help().split()).count(f"only {words} may be changed") == 1
    assert parser.takes("model.dtype") == ("model.dtype" in fields)
    assert parser.takes("mesh.data") == ("mesh." in fields)
    assert not parser.takes("model.width")


def test_a_field_that_is_not_taken_is_refused_with_the_reason() -> None:
    parser = cli.Parser(example="x", fields=("mesh.",))
    with pytest.raises(UserError, match=r"^--config\.model\.width: the weights fix it; allowed: --config\.mesh\.\*$"):
        cli.overrides(["--config.model.width=8"], parser, otherwise="the weights fix it")
    assert cli.overrides(["--config.mesh.data=2"], parser) == {"mesh.data": 2}


_LONG = "a" * 300  # a file name has at most 255 bytes


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--config", _LONG, "--workdir", "run"],
        ["train.py", "--config", "configs/demo.py", "--workdir", _LONG],
        ["train.py", "--config", "configs/demo.py", "--workdir", "run", f"--config.data.tokenizer={_LONG}"],
        ["train.py", "--config", "configs/demo.py", "--workdir", "run", f"--config.data.source=prepared:{_LONG}"],
        ["train.py", "--from", _LONG, "--workdir", "run"],
        ["mhc.eval.compare", _LONG],
        ["mhc.eval.perplexity", "--checkpoint", _LONG],
        ["mhc.eval.replay", _LONG, "--step", "3"],
        ["mhc.interop.import_hf", _LONG, "--workdir", "run"],
        ["mhc.grid", "run", _LONG, "--workdir", "run"],
    ],
    ids=lambda words: " ".join(words).replace(_LONG, "LONG"),
)
def test_a_path_that_no_file_can_have_is_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = words
    module = "train" if program == "train.py" else program
    main = importlib.import_module(
        module if hasattr(importlib.import_module(module), "main") else f"{module}.__main__"
    ).main
    with pytest.raises(SystemExit) as left:
        cli.run_main(main, arguments)
    assert left.value.code == 2
    assert re.fullmatch(r"error: .*File name too long", capsys.readouterr().err.strip())
