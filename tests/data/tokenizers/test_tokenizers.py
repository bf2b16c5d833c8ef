"""Test tokenisers: bytes there and back, BPE with exact byte counts, special tokens, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mhc.data import tokenizers
from mhc.errors import UserError

TEXT = [
    "the width of a stream is not its depth",
    "naïve ширина 深さ 🙂🙂 — the stream",
    "x = [1, 2]  # two\n\treturn x\n",
] * 20


def byte_level(specials: tuple[str, ...] = ("<|endoftext|>",), **options: bool) -> Tokenizer:
    """Return a byte-level BPE of 350 pieces, trained on `TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def fallback() -> Tokenizer:
    """Return a character BPE with byte fallback, as Llama 2's: metaspace, <0xHH> pieces, a lossy normaliser."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT[:1], trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(described))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizers")
    byte_level().save(str(path / "bytelevel.json"))
    byte_level(add_prefix_space=False).save(str(path / "noprefix.json"))
    fallback().save(str(path / "fallback.json"))
    byte_level(()).save(str(path / "none.json"))
    return path


@settings(deadline=None, max_examples=30)
@given(text=st.text())
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = tokenizers.load("bytes")
    ids, lengths = tokenizer.encode_with_bytes(text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text.encode()))
    assert ids.dtype == np.int32
    assert lengths.sum() == len(text.encode()) == tokenizer.byte_lengths[ids].sum()
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size == 258
    assert tokenizer.byte_lengths[[256, 257]].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["bytelevel", "noprefix", "fallback"])
@settings(deadline=None, max_examples=60)
@given(text=st.one_of(st.text(), st.text(alphabet="the widt\n é深🙂"), st.sampled_from(TEXT)))
def test_the_bytes_of_a_documents_tokens_add_up_to_the_document(folder: Path, name: str, text: str) -> None:
    tokenizer = tokenizers.load(str(folder / f"{name}.json"))
    ids, lengths = tokenizer.encode_with_bytes(text)
    assert ids.dtype == lengths.dtype == np.int32
    assert (lengths >= 0).all()
    if len(ids):
        assert lengths.sum() == len(text.encode())
    if name == "noprefix":  # nothing is added or dropped, so that the table knows as much as the offsets
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_each_id_of_plain_words_has_its_own_bytes(folder: Path) -> None:
    tokenizer = tokenizers.load(str(folder / "noprefix.json"))
    ids, lengths = tokenizer.encode_with_bytes("the width of a stream")
    assert [len(tokenizer.decode([id_])) for id_ in ids] == lengths.tolist() == tokenizer.byte_lengths[ids].tolist()
    ids, lengths = tokenizer.encode_with_bytes("ширина naïve 深さ the stream 🙂 width")
    whole = [count for count in range(len(ids) + 1) if "\ufffd" not in tokenizer.decode(ids[:count])]
    assert len(whole) > 10  # the others end within a character
    for count in whole:
        assert lengths[:count].sum() == len(tokenizer.decode(ids[:count]).encode())


def test_begin_and_end_are_found_by_their_names(folder: Path) -> None:
    llama = tokenizers.load(str(folder / "fallback.json"))
    assert (llama.bos_id, llama.eos_id) == (1, 2)
    assert llama.byte_lengths[[1, 2]].tolist() == [0, 0]
    gpt = tokenizers.load(str(folder / "bytelevel.json"))
    assert gpt.bos_id == gpt.eos_id == 0  # one of the two found: it serves as both
    none = tokenizers.load(str(folder / "none.json"))
    size = Tokenizer.from_file(str(folder / "none.json")).get_vocab_size()
    assert (none.bos_id, none.eos_id, none.vocab_size) == (size, size, size + 1)
    assert none.decode([none.bos_id, *none.encode("the width"), none.eos_id]).strip() == "the width"
    assert len({llama.content_hash, gpt.content_hash, none.content_hash}) == 3


def test_a_text_that_spells_a_special_token_is_text(folder: Path) -> None:
    tokenizer = tokenizers.load(str(folder / "noprefix.json"))
    text = "a<|endoftext|>b"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer: 'byte' is neither 'bytes' nor .*; did you mean 'bytes'\?$"):
        tokenizers.load("byte")
    with pytest.raises(UserError, match=r"nowhere.json' is neither 'bytes' nor an existing tokenizer.json file$"):
        tokenizers.load(str(tmp_path / "nowhere.json"))
    for content in ("{}", "not json", "[]"):
        (tmp_path / "wrong.json").write_text(content)
        with pytest.raises(UserError, match=r"wrong.json is not a tokenizer.json file: [^\n]+$"):
            tokenizers.load(str(tmp_path / "wrong.json"))
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        tokenizers.load(str(tmp_path))


# Named beside the file ------------------------------------------------------------------------------------------------


def test_what_lies_beside_the_file_names_bos_and_eos(tmp_path: Path) -> None:
    """The file names them as text or as an object, before the usual names, and makes another tokeniser of the json."""
    path = tmp_path / "tokenizer.json"
    byte_level(("<|endoftext|>", "<start>", "<stop>")).save(str(path))
    usual = tokenizers.JsonTokenizer(path)
    assert usual.bos_id == usual.eos_id == 0
    (tmp_path / tokenizers.SPECIAL).write_text(json.dumps({"bos_token": "<start>", "eos_token": {"content": "<stop>"}}))
    named = tokenizers.JsonTokenizer(path)
    assert (named.bos_id, named.eos_id, named.vocab_size) == (1, 2, usual.vocab_size)
    assert list(named.byte_lengths[:3]) == [0, 0, 0]
    assert named.content_hash != usual.content_hash
    (tmp_path / tokenizers.SPECIAL).write_text(json.dumps({"bos_token": None, "eos_token": "<end>"}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token '<end>' is not in tokenizer\.json"):
        tokenizers.JsonTokenizer(path)
    (tmp_path / tokenizers.SPECIAL).write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config\.json"):
        tokenizers.JsonTokenizer(path)


def test_deepseeks_names_are_known(tmp_path: Path) -> None:
    byte_level(("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")).save(str(tmp_path / "tokenizer.json"))
    made = tokenizers.JsonTokenizer(tmp_path / "tokenizer.json")
    assert (made.bos_id, made.eos_id) == (0, 1)


def test_a_dropout_of_merges_is_switched_off(tmp_path: Path) -> None:
    """With dropout every reading of a text would differ, and so would every resume, host and prepared folder."""
    described = json.loads(byte_level().to_str())
    (tmp_path / "plain.json").write_text(json.dumps(described))
    described["model"]["dropout"] = 0.5
    (tmp_path / "random.json").write_text(json.dumps(described))
    plain, random = (tokenizers.load(str(tmp_path / f"{name}.json")) for name in ("plain", "random"))
    for _ in range(20):
        np.testing.assert_array_equal(random.encode(TEXT[0]), plain.encode(TEXT[0]))


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"model": {}}',
        '{"model": []}',
        '{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}, "version": "1.0"}',
        '{"version": "1.0", "model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]]}}',
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}',
        '{"version": "9.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_tokeniser_is_a_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"^data.tokenizer: {path} (is not a|has |is a git-lfs)[^\n]+$"):
        tokenizers.load(str(path))
