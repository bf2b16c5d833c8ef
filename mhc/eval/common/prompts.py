"""Read prompts and other texts that a user gives on the command line or in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mhc.data.tokenizers.spelling import utf8
from mhc.data.user_files.formats import is_lines, is_parquet, pointer
from mhc.errors import UserError


class Prompt(str):
    """Holds a text together with the place that it was read from."""

    place: str  # for messages


def check_text(text: str, place: str) -> None:
    """Refuse a text that has no UTF-8, one with half a character. Raises UserError, which names ``place``."""
    try:
        utf8(text)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def check_stops(stops: Iterable[str]) -> None:
    """Refuse a ``--stop`` that is empty or has no UTF-8. Raises UserError."""
    for stop in stops:
        if not stop:
            raise UserError("--stop: given '', allowed: a text")
        check_text(stop, "--stop")


def read_prompts(path: str, field: str) -> list[str]:
    """Return the prompts of a file, each a `Prompt`: its lines but empty ones, or a field of each line of a .jsonl.

    Raises:
      UserError: no such file, no UTF-8, a line that is no object with the field, or no prompt at all.
    """
    try:
        content = Path(path).read_bytes()
        if what := pointer(content):
            raise UserError(f"--prompts: {path} is a {what}")
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"--prompts: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"--prompts: {path}, line {where}, is not UTF-8 (byte {error.start})") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"--prompts: {path}, line {number}"
            text = _of_line(line, field, place) if is_lines(path) and not is_parquet(path) else line.removesuffix("\r")
            check_text(text, place)
            prompt = Prompt(text)
            prompt.place = place
            prompts.append(prompt)
    if not prompts:
        raise UserError(f"--prompts: {path} holds no prompt")
    return list(prompts)


def place_of(prompt: str, number: int) -> str:
    """Return where a prompt is from, for messages; ``number``: its number, from 1."""
    return prompt.place if isinstance(prompt, Prompt) else f"prompt {number}"


def _of_line(line: str, field: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {getattr(error, 'msg', None) or error}") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        has = f"it has: {', '.join(value)}" if isinstance(value, dict) else "it is no object"
        raise UserError(f"{place}: no text in field {field!r} (--field); {has}")
    return str(value[field])
