"""Test tokenisers that lose text or cannot encode every text, and ids whose bytes are those that they decode to."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mhc import cli
from mhc.config import DataConfig
from mhc.data import inspect, tokenizers, warning
from mhc.data.corpus import fidelity
from mhc.data.pipeline import train_iterator, validation_batches
from mhc.data.prepare import __main__ as prepare
from mhc.data.rows.encoding import open_corpus
from mhc.errors import UserError
from mhc.eval.compare import __main__ as compare
from mhc.eval.perplexity import __main__ as perplexity
from mhc.files import read_json, read_jsonl
from tests.small_runs import config, run

HERE = Path(__file__).parents[1] / "tokenizers"
WORDS = ["the", "cat", "and", "a", "dog", "of", "six", "hats"]  # of letters that all of them know
LOSSY = ("bpe_no_unk", "unigram_unk", "wordpiece_unk")
WHOLE = ("llama2", "unigram_no_unk")
SCRIPT = "Ж🙂"  # that only llama2 knows


def texts(folder: Path, words: list[str], count: int = 40, seed: int = 0) -> str:
    """Write ``count`` files of words, and return the source."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        chosen = [rng.choice(words) for _ in range(rng.randint(20, 60))]
        (folder / f"{number:02d}.txt").write_text(" ".join(chosen), "utf-8")
    return f"text:{folder}/*.txt"


def data_of(tmp_path: Path, name: str, source: str, **changes: Any) -> DataConfig:
    fields: dict[str, Any] = {"sequence_length": 16, "cache_dir": str(tmp_path / "cache"), "prefetch": 0} | changes
    return DataConfig(source=source, tokenizer=str(HERE / f"{name}.json"), **fields)


def share(data: DataConfig) -> float:
    tokenizer = tokenizers.load(data.tokenizer)
    return fidelity.share_lost(open_corpus(data, tokenizer, "validation"), tokenizer)


# Bytes that are lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LOSSY, *WHOLE])
def test_nothing_is_lost_of_a_text_that_the_ids_tell(tmp_path: Path, name: str) -> None:
    words = ["the", "cat", "and", "a", "dog"]  # in ids that a space belongs between
    assert share(data_of(tmp_path, name, texts(tmp_path / "texts", words))) == 0


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_unknown_or_dropped_is_counted(tmp_path: Path, name: str) -> None:
    """About half is lost where half of the bytes are unknown, and about a thousandth where one in a thousand is."""
    half = share(data_of(tmp_path, name, texts(tmp_path / "half", ["the", "Ж"])))
    assert 0.2 < half < 0.6
    few = texts(tmp_path / "few", ["cat"])
    for number in (3, 4, 5):
        path = tmp_path / "few" / f"{number:02d}.txt"
        path.write_text(path.read_text() + " Ж cat", "utf-8")
    some = share(data_of(tmp_path, name, few, validation=few.replace("*", "0[0-9]")))
    size = sum(len((tmp_path / "few" / f"0{number}.txt").read_bytes()) for number in range(10))
    # The letters, perhaps with the space before them; of a tokeniser without spaces also those of the same files.
    spaces = sum(path.read_text("utf-8").count(" ") for path in (tmp_path / "few").glob("0[345].txt"))
    assert 6 / size <= some <= (12 + (spaces if name == "bpe_no_unk" else 0)) / size


@pytest.mark.parametrize(
    ("normalizer", "text", "lost"),
    [
        ({"type": "Lowercase"}, "The Cat and a dog", 2),
        ({"type": "Strip", "strip_left": True, "strip_right": True}, "the cat  \n", 3),
        ({"type": "Replace", "pattern": {"String": "dog"}, "content": "cat"}, "a dog", 3),
        ({"type": "NFKC"}, "the cat", 0),
    ],
)
def test_what_a_normaliser_changes_is_lost(tmp_path: Path, normalizer: Any, text: str, lost: int) -> None:
    described = json.loads((HERE / "wordpiece_unk.json").read_text("utf-8"))
    described |= {"normalizer": normalizer, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert tokenizers.load(str(tmp_path / "tokenizer.json")).lost(text) == lost


@pytest.mark.parametrize("name", ["llama2", "bpe_no_unk", "unigram_unk", "wordpiece_unk"])
@settings(deadline=None, max_examples=40)
@given(text=st.text("the cat\n Ж🙂.", max_size=30))
def test_the_lost_bytes_are_of_the_text(name: str, text: str) -> None:
    tokenizer = tokenizers.load(str(HERE / f"{name}.json"))
    lost = tokenizer.lost(text)
    assert 0 <= lost <= len(text.encode())
    if tokenizer.decode(tokenizer.encode(text)) != text:
        unknown = sum(len(letter.encode()) for letter in text if letter in SCRIPT)
        assert lost >= (0 if name == "llama2" else unknown)


LOSSY_NAME = str(HERE / "wordpiece_unk.json")
WHY = f"{LOSSY_NAME} loses "


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return (source, run of two steps), where one word of nine is unknown."""
    folder = tmp_path_factory.mktemp("lossy")
    source = texts(folder / "texts", [*WORDS, "Ж"])
    made = config(source, "plain", data={"tokenizer": LOSSY_NAME}, train={"steps": 2}, validation={"every": 2})
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert run(made, folder / "runs" / "text") == 0
    assert WHY in said.getvalue()
    return source, folder / "runs" / "text"


def test_bits_per_byte_is_null_with_its_reason(
    lossy: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = lossy
    last = read_jsonl(folder / "metrics.jsonl")[-1]
    assert last["val_loss"] > 0 and last["val_bits_per_byte"] is None
    summary = read_json(folder / "summary.json")
    assert summary["bits_per_byte"] is None and summary["bits_per_byte_reason"].startswith(WHY)
    found = tmp_path / "found.json"
    assert perplexity.main(["--checkpoint", str(folder), "--json", str(found)]) == 0
    (scored,) = read_json(found)["checkpoints"]
    assert scored["bits_per_byte"]["value"] is None and scored["bits_per_byte_reason"].startswith(WHY)
    assert WHY in capsys.readouterr().out
    arguments = ["--config.data.source", source, "--config.data.tokenizer", LOSSY_NAME, "--split", "validation"]
    shown = tmp_path / "shown.json"
    assert inspect.main(["--config", "configs/default.py", *arguments, "--json", str(shown)]) == 0
    assert WHY in capsys.readouterr().out and read_json(shown)["bytes_lost"] > 0.02


@pytest.mark.long  # draws every figure
def test_the_report_says_what_is_lost(lossy: tuple[str, Path]) -> None:
    _, folder = lossy
    assert compare.main([str(folder.parent), "--no_recompute"]) == 0
    assert WHY in (folder.parent / "report.html").read_text("utf-8")
    assert read_json(folder.parent / "summary.json")["arms"]["text"]["bytes_lost"] > 0.02


def test_a_prepared_folder_knows_what_was_lost(
    lossy: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older folder does not, but its ids show what is unknown; a lossless tokeniser adds nothing to the manifest."""
    source, _ = lossy
    for name in (LOSSY_NAME, str(HERE / "llama2.json")):
        out = tmp_path / Path(name).stem
        arguments = ["--source", source, "--out", str(out), "--tokenizer", name, "--sequence_length", "16"]
        assert prepare.main(arguments) == 0
        lost = read_json(out / "manifest.json").get("lost", 0.0)
        data = DataConfig(source=f"prepared:{out}", tokenizer=name, sequence_length=16)
        tokenizer = tokenizers.load(name)
        opened = open_corpus(data, tokenizer, "train")
        assert fidelity.share_lost(opened, tokenizer) == lost
        if name == LOSSY_NAME:
            assert lost > 0.02 and WHY in capsys.readouterr().err
            del opened.manifest["lost"]  # type: ignore[attr-defined]
            assert fidelity.share_lost(opened, tokenizer) > 0.02
        else:
            assert lost == 0 and "lost" not in read_json(out / "manifest.json")


# Texts that cannot be encoded -----------------------------------------------------------------------------------------


def unknown(name: str, model: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        described = json.loads((HERE / "wordpiece_unk.json").read_text("utf-8"))
        described |= {"model": model(described["model"]), "added_tokens": []}
        path = folder / f"{name}.json"
        path.write_text(json.dumps(described))
        return str(path)

    return write


KINDS = {
    "unigram": lambda folder: str(HERE / "unigram_no_unk.json"),
    "wordpiece": unknown("wordpiece", lambda model: {**model, "unk_token": "[MISSING]"}),
    "wordlevel": unknown(
        "wordlevel",
        lambda model: {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(WORDS)}, "unk_token": "[UNK]"},
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("ending", ["jsonl", "txt"])
def test_a_text_without_ids_is_a_line_that_names_its_place(
    tmp_path: Path, kind: str, ending: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = KINDS[kind](tmp_path)
    folder = tmp_path / "texts"
    texts(folder, WORDS, count=10)
    lines = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    lines[6] += " zebraЖ"
    file = folder / "03.txt"
    if ending == "jsonl":
        file = folder / "all.jsonl"
        file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    else:
        file.write_text(lines[6], "utf-8")
    place = rf"{file}, " + ("line 7" if ending == "jsonl" else "bytes 0–")
    source = f"text:{folder}/*.{ending}"
    data = DataConfig(source=source, tokenizer=name, sequence_length=8, cache_dir=str(tmp_path / "c"), holdout=0.1)
    tokenizer = tokenizers.load(name)
    assert not tokenizer.total
    fault = rf"^{place}.*: data\.tokenizer: {name} cannot encode: .*zebraЖ'$"
    splits = []
    for read in (lambda: train_iterator(data, tokenizer, batch_size=2, seed=0), lambda: validation(data, tokenizer)):
        try:
            read()
        except UserError as error:
            splits.append(str(error))
    (said,) = splits  # it is in one of the two
    with pytest.raises(UserError, match=fault):
        raise UserError(said)
    # A corpus too large to be encoded beforehand: when it comes to the document.
    monkeypatch.setattr(fidelity, "_CHECKED", 0)
    iterator = train_iterator(data, tokenizer, batch_size=2, seed=0)
    try:
        with pytest.raises(UserError) as caught:
            read_on(iterator, data, tokenizer)
    finally:
        iterator.close()
    assert re.search(fault, str(caught.value))
    fields = {"source": source, "tokenizer": name, "sequence_length": 8, "holdout": 0.1}
    overrides = [f"--config.data.{field}={value}" for field, value in fields.items()]
    for program, arguments in (
        (prepare.main, ["--source", source, "--out", str(tmp_path / "out"), "--tokenizer", name, "--workers", "1"]),
        (inspect.main, ["--config", "configs/default.py", *overrides, "--batches", "40", "--rows", "0"]),
    ):
        with pytest.raises(SystemExit) as left:
            cli.run_main(program, arguments)
        last = capsys.readouterr().err.splitlines()[-1]
        assert left.value.code == 2 and last.startswith(f"error: {file}, ") and "cannot encode" in last


def read_on(iterator: Any, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> None:
    list(validation(data, tokenizer))
    for _ in range(200):
        next(iterator)


def validation(data: DataConfig, tokenizer: tokenizers.Tokenizer) -> Any:
    return validation_batches(data, tokenizer, batch_size=2, batches=0)


def test_a_corpus_that_it_can_encode_is_read(tmp_path: Path) -> None:
    data = data_of(tmp_path, "unigram_no_unk", texts(tmp_path / "texts", WORDS))
    tokenizer = tokenizers.load(data.tokenizer)
    iterator = train_iterator(data, tokenizer, batch_size=2, seed=0)
    assert next(iterator)["weights"].all()
    iterator.close()


# The bytes of ids -----------------------------------------------------------------------------------------------------


def spelled_spaces(folder: Path) -> str:
    """Return a tokeniser of Llama 2's kind without an id for a space, which bytes E2 96 81 stand for."""
    described = json.loads((HERE / "llama2.json").read_text("utf-8"))
    vocabulary = [piece for piece in described["model"]["vocab"] if piece != "▁"]
    described["model"]["vocab"] = {piece: number for number, piece in enumerate(vocabulary)}
    path = folder / "spelled.json"
    path.write_text(json.dumps(described), "utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["llama2", "spelled", "unigram_unk", "unigram_no_unk", "wordpiece_unk", "bytes"])
@settings(deadline=None, max_examples=50)
@given(words=st.lists(st.sampled_from([*WORDS, "Ж", "🙂", "深さ"]), min_size=1, max_size=12))
def test_ids_have_the_bytes_of_their_text(
    tmp_path_factory: pytest.TempPathFactory, kind: str, words: list[str]
) -> None:
    """Ids have the bytes of their text as a whole, and of blocks that end with a word."""
    path = {"bytes": "bytes", "spelled": ""}.get(kind, str(HERE / f"{kind}.json"))
    tokenizer = tokenizers.load(path or spelled_spaces(tmp_path_factory.mktemp("spelled")))
    if kind not in ("llama2", "spelled", "bytes"):
        words = [word if word.isascii() else "cat" for word in words]
    text = " ".join(words)
    ids = tokenizer.encode(text)
    lengths = tokenizer.bytes_of(ids, True)
    assert lengths.dtype == np.int32 and (lengths >= 0).all()
    assert lengths.sum() == len(text.encode())
    behind = tokenizer.encode(f"cat {text}")[len(tokenizer.encode("cat")) :]
    assert tokenizer.bytes_of(behind, False).sum() == len(text.encode()) + 1


@pytest.mark.parametrize("kind", ["llama2", "spelled"])
def test_a_corpus_of_ids_is_scored_as_its_text_is(tmp_path: Path, kind: str) -> None:
    name = spelled_spaces(tmp_path) if kind == "spelled" else str(HERE / "llama2.json")
    tokenizer, source = tokenizers.load(name), texts(tmp_path / "texts", [*WORDS, "Ж"], count=5)
    for path in (tmp_path / "texts").glob("*.txt"):
        np.save(path.with_suffix(".npy"), tokenizer.encode(path.read_text("utf-8")).astype(np.uint16))
    counted = []
    for of in (source, source.replace("text:", "tokens:").replace(".txt", ".npy")):
        data = DataConfig(
            source="stdlib", validation=of, tokenizer=name, sequence_length=32, cache_dir=str(tmp_path / "cache")
        )
        batches = list(validation_batches(data, tokenizer, batch_size=4, batches=0))
        counted.append(sum(int(batch["target_bytes"].sum()) for batch in batches))
    size = sum(len(path.read_bytes()) for path in (tmp_path / "texts").glob("*.txt"))
    assert counted == [size, size]


def byte_level(special: bool) -> Tokenizer:
    """Return a byte-level BPE without merges, with an entry for the end of a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    made.add_tokens([AddedToken("</s>", special=special)])
    return made


def whole_words() -> Tokenizer:
    """Return a tokeniser whose vocabulary is words, one of which is the end of a text."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@pytest.mark.parametrize(
    ("library", "spells"), [(byte_level(True), False), (byte_level(False), True), (whole_words(), True)]
)
def test_a_text_that_spells_the_end_is_told_where_it_ends_a_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, library: Tokenizer, spells: bool
) -> None:
    warning.warn_once.cache_clear()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("one </s> two\n\n" * 200)
    tokenizer = tokenizers.load(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.eos_id in tokenizer.encode("one </s> two")) == spells == bool(tokenizer.spelled)
    data = DataConfig(source=f"text:{tmp_path}/a.txt", tokenizer=f"{tmp_path}/tokenizer.json", sequence_length=16)
    with caplog.at_level(logging.WARNING):
        open_corpus(data, tokenizer, "train")
    assert spells == any("reads the text '</s>' as the id that begins or ends a" in line for line in caplog.messages)
