"""Test mhc.data.inspect: it shows what the batches hold, and its counts add up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mhc import cli
from mhc.data import inspect, prepare, tokenizers

TEXTS = ["one", "two and a half — naïve", "", "three " * 20]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return arguments for rows of 16 places, four at a time, over four files that are read whole for validation."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    (tmp_path / "train.txt").write_text("training " * 50, "utf-8")
    fields = {
        "data.source": f"text:{tmp_path}/train.txt",
        "data.validation": f"text:{tmp_path}/[0-9].txt",
        "data.cache_dir": str(tmp_path / "cache"),
        "data.sequence_length": 16,
        "train.batch_size": 4,
    }
    config = str(Path(__file__).parents[2] / "configs" / "default.py")
    return ["--config", config, *(f"--config.{name}={value}" for name, value in fields.items())]


def test_every_text_is_shown_once_and_counted(arguments, tmp_path, capsys):
    file = tmp_path / "found.json"
    more = ["--split", "validation", "--rows", "4", "--batches", "9", "--documents", "0", "--json", str(file)]
    assert inspect.main([*arguments, *more]) == 0
    out = capsys.readouterr().out
    for text in TEXTS[:2]:
        assert repr(f"⟨bos⟩{text}⟨eos⟩")[1:10] in out
    found = json.loads(file.read_text())
    whole = [text for text in TEXTS if text]  # an empty file is no document
    assert (found["documents"], found["tokens"]) == (3, sum(len(text.encode()) + 1 for text in whole))
    assert found["bytes"] == sum(len(text.encode()) for text in whole)
    assert sum(one["documents"] for one in found["histogram"]) == 3
    assert found["tokens_of_a_document"]["max"] == len(TEXTS[3]) + 1
    rows = -(-found["tokens"] // 16)
    batches = -(-rows // 4)
    assert found["batches"] == batches
    assert found["padding"] == pytest.approx(1 - found["tokens"] / (batches * 4 * 16))
    assert f"{-found['tokens'] % 16} places of padding" in out  # of the last row with a text


def test_segments_are_those_of_the_batch(arguments):
    parser = cli.Parser(example="", fields=cli.EVERY_FIELD)
    config = cli.load_config(arguments[1], arguments[2:], parser)
    ((_, batch), *_) = inspect.read(config, "validation", 1)
    tokenizer = tokenizers.load("bytes")
    shown = [one for row in range(4) for one in inspect.segments(tokenizer, batch, row)]
    assert shown[0].text == "⟨bos⟩one⟨eos⟩" and shown[0].positions == (0, 3)
    assert sum(one.counted for one in shown) == int((batch["weights"] > 0).sum())
    assert all(one.positions[1] - one.positions[0] == one.last - one.first for one in shown)
    lines = list(inspect.describe_places(tokenizer, batch, 0))
    assert len(lines) == 1 + 16 and "'⟨bos⟩' → 'o'" in lines[1] and "→ '⟨eos⟩'" in lines[4]


def test_several_sets_are_told_apart(arguments, tmp_path, capsys):
    file = tmp_path / "found.json"
    named = [one.replace("=text:", "=sets:a=text:") for one in arguments if "validation" in one]
    more = [f"{named[0]}; b=text:{tmp_path}/1.txt", "--split", "validation", "--json", str(file), "--documents", "0"]
    assert inspect.main([*arguments, *more]) == 0
    out = capsys.readouterr().out
    assert "set a, batch 0, row 0: " in out and "set b, batch 0, row 1: " in out and "set b, batch 1" not in out
    assert "\nset a:\n3 documents: " in out and "\nset b:\n1 documents: " in out
    found = json.loads(file.read_text())["sets"]
    assert found["b"]["tokens"] == len(TEXTS[1].encode()) + 1 and found["a"]["documents"] == 3


def test_what_is_said_of_a_prepared_folder_is_a_line_on_stderr(arguments, tmp_path, capsys):
    source, out = f"text:{tmp_path}/train.txt", tmp_path / "out"
    prepare.prepare(source, str(out), sequence_length=8, workers=1, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as raised:
        cli.run_main(inspect.main, [*arguments, f"--config.data.source=prepared:{out}"])
    assert raised.value.code == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: prepared:{out} was prepared for data.sequence_length=8, ")


def test_special_ids_are_spelled():
    tokenizer = tokenizers.load("bytes")
    assert inspect.spelled(tokenizer, np.array([256, 97, 257, 257, 256])) == "⟨bos⟩a⟨eos⟩⟨eos⟩⟨bos⟩"
    assert inspect.spelled(tokenizer, np.array([97, 98])) == "ab"


@pytest.mark.parametrize(("option", "message"), [("--batches=0", "--batches: given 0"), ("--rowz=1", "--rows")])
def test_mistakes(arguments, option, message, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.run_main(inspect.main, [*arguments, option])
    assert raised.value.code == 2 and message in capsys.readouterr().err
