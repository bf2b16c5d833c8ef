"""Test a damaged checkpoint: one line says what is damaged, and how to go on from another."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mhc.errors import UserError
from mhc.train.checkpoint import committed_steps, load_run, standing_of
from tests.small_runs import config, run, write_corpus

pytestmark = pytest.mark.usefixtures("compiled_once")

HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "flipped": lambda content: bytes(byte ^ 0xFF for byte in content),
    "other": lambda content: b'{"a": 1}',
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("made")
    corpus = write_corpus(folder / "texts")
    assert run(config(corpus, "plain", checkpoint={"keep": 3}), folder / "run") == 0
    return folder / "run"


@pytest.mark.product
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_a_line_that_says_how_to_go_on(harm: str, made: Path, tmp_path: Path) -> None:
    files = sorted(path.relative_to(made) for path in (made / "checkpoints" / "12").rglob("*") if path.is_file())
    refused = 0
    for number, file in enumerate(files):
        copy = Path(shutil.copytree(made, tmp_path / str(number)))
        content = HARMS[harm]((copy / file).read_bytes())
        (copy / file).unlink()
        if content is not None:
            (copy / file).write_bytes(content)
        try:
            load_run(copy), standing_of(copy, 12)
        except UserError as error:
            refused += 1
            said = str(error)
            assert re.fullmatch(
                rf"{copy}: checkpoint 12 is damaged: .+; other steps: 4, 8; "
                rf"to go on from 8, move or delete {copy}/checkpoints/12",
                said,
            )
            assert "<" not in said and "slice(" not in said and "\n" not in said
        shutil.rmtree(copy)
    assert refused >= 3


def test_the_advice_is_right(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "run"))
    (copy / "checkpoints" / "12" / "state" / "manifest.ocdbt").unlink()
    shutil.rmtree(copy / "checkpoints" / "12" / "state" / "ocdbt.process_0")
    again = config(f"text:{made.parent}/texts/*.txt", "plain", checkpoint={"keep": 3}, train={"steps": 14})
    with pytest.raises(UserError, match=r"checkpoint 12 is damaged: .*; to go on from 8, move or delete "):
        run(again, copy)
    shutil.rmtree(copy / "checkpoints" / "12")
    assert run(again, copy) == 0
    assert load_run(copy).step == 14


def test_what_else_lies_among_the_checkpoints_is_not_seen(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "run"))
    folder = copy / "checkpoints"
    for name in ("12_backup", "12 (copy)", "012", ".12.part"):
        shutil.copytree(folder / "12", folder / name)
    (folder / "latest").symlink_to(folder / "8")
    for name in (".DS_Store", "notes.txt", "16"):
        (folder / name).write_text("x")
    assert committed_steps(copy) == [4, 8, 12] and load_run(copy).step == 12


def test_of_an_earlier_step_the_others_are_named_alone(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints" / "4" / "state")
    with pytest.raises(UserError, match=r"checkpoint 4 is damaged: .*/4/state is missing; other steps: 8, 12$"):
        load_run(copy, 4)
