"""Test a tokeniser trained on text: it spells everything, and what it cannot be trained on is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mhc.data import tokenizers
from mhc.data.train_tokenizer import main
from mhc.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"the stream {number} and the norm of the stream\n" * 20)
    return f"text:{tmp_path}/*.txt"


def trained(corpus: str, file: Path, size: int) -> tokenizers.Tokenizer:
    assert main(["--source", corpus, "--vocab_size", str(size), "--out", str(file)]) == 0
    return tokenizers.load(str(file))


def test_any_text_is_spelt_exactly_and_its_own_text_in_few_ids(corpus: str, tmp_path: Path) -> None:
    tokenizer = trained(corpus, tmp_path / "t.json", 300)
    assert tokenizer.vocab_size <= 300 and tokenizer.bos_id != tokenizer.eos_id
    for text in ("the stream", "Ωμέγα — 漢字 \t\n\x00", " <s> is text </s>", ""):
        ids, lengths = tokenizer.encode_with_bytes(text)
        assert tokenizer.decode(ids) == text and lengths.sum() == len(text.encode())
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
    assert len(tokenizer.encode("the stream and the norm")) < 10
    assert (tmp_path / "t.json").read_bytes() == _again(corpus, tmp_path, 300)


def _again(corpus: str, folder: Path, size: int) -> bytes:
    trained(corpus, folder / "again.json", size)
    return (folder / "again.json").read_bytes()


def test_a_corpus_of_one_document_is_told_of_the_option_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"body": "the stream and the norm of the stream"}\n')
    arguments = ["--source", f"text:{tmp_path}/one.jsonl", "--vocab_size", "300", "--out", str(tmp_path / "t.json")]
    with pytest.raises(UserError, match=r"no field 'text' \(--field\)"):
        main(arguments)
    with pytest.raises(UserError, match=r"for train of 1 document\(s\) at --holdout=0\.05; change --holdout$"):
        main([*arguments, "--field", "body"])
    assert main([*arguments, "--field", "body", "--holdout", "0"]) == 0


def test_a_tokeniser_that_is_there_is_kept(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError, match=r"t\.json: there is a file already"):
        main(["--source", corpus, "--vocab_size", "300", "--out", str(tmp_path / "t.json")])
    assert (tmp_path / "t.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vocab_size", "100"], "--vocab_size: given 100, allowed: from 258"),
        (["--vocab_size", "1" + 30 * "0"], "to 16777216"),
        (["--source", "tokens:*.bin"], "--source: given 'tokens:.*', allowed: text, not ids"),
        (["--source", "no/*.txt"], "^--source: given 'no/"),
        (["--source", "text:"], "^--source: given 'text:'"),
        (["--source", "mix:a=text:x"], "^--source: the part 'a' has no weight"),
        (["--holdout", "1.5"], "^--holdout: given 1.5"),
        (["--cache_dir", "/dev/null/x", "--source", "stdlib"], "^--cache_dir: cannot write"),
        (["--out", "no/such/folder/t.json"], "--out: cannot write no/such/folder/t.json"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, corpus: str, tmp_path: Path) -> None:
    usual = ["--source", corpus, "--vocab_size", "300", "--out", str(tmp_path / "t.json")]
    with pytest.raises(UserError, match=said) as raised:
        main([*usual, *arguments])
    assert "\n" not in str(raised.value) and not (tmp_path / "t.json").exists()
