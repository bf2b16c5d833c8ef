"""Test packing: every token is a target once, nothing leaks, and two integers describe a stream."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc.data.corpus.pieces import Piece, Pieces
from mhc.data.rows.packing import Batch, Document, DocumentStream, empty_batch, fill_row

BOS, EOS = 1_000_000, 1_000_001

quick = settings(deadline=None, max_examples=40)
documents_of = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def make(lengths: list[int]) -> list[Document]:
    """Make documents whose tokens are all different, so that a token tells where it came from; byte counts likewise."""
    made, first = [], 0
    for length in lengths:
        ids = np.arange(first, first + length, dtype=np.int32)
        first += length
        tokens = np.concatenate([[BOS], ids, [EOS]]).astype(np.int32)
        made.append(Document(tokens, np.concatenate([ids % 5 + 1, [0]]).astype(np.int32)))
    return made


def pack(documents: list[Document], length: int) -> Batch:
    stream = DocumentStream(documents.__getitem__, 0, 1, end=len(documents))
    rows = []
    while True:
        batch = empty_batch(1, length)
        if not fill_row(batch, 0, stream):
            break
        rows.append(batch)
    return {name: np.concatenate([batch[name] for batch in rows]) for name in rows[0]}


@quick
@given(lengths=documents_of, length=st.integers(1, 32))
def test_every_pair_of_a_document_appears_once_and_in_order(lengths: list[int], length: int) -> None:
    documents = make(lengths)
    batch = pack(documents, length)
    valid = batch["weights"] > 0
    np.testing.assert_array_equal(batch["tokens"][valid], np.concatenate([d.tokens[:-1] for d in documents]))
    np.testing.assert_array_equal(batch["targets"][valid], np.concatenate([d.tokens[1:] for d in documents]))
    np.testing.assert_array_equal(batch["target_bytes"][valid], np.concatenate([d.target_bytes for d in documents]))


@quick
@given(lengths=documents_of, length=st.integers(1, 32))
def test_a_segment_holds_one_document_and_counts_its_positions_from_zero(lengths: list[int], length: int) -> None:
    owner = {token: number for number, d in enumerate(make(lengths)) for token in d.tokens[1:-1].tolist()}
    batch = pack(make(lengths), length)
    for row in range(len(batch["tokens"])):
        segments = batch["segment_ids"][row]
        count = int(segments.max())
        assert sorted(set(segments.tolist()) - {0}) == list(range(1, count + 1))
        for segment in range(1, count + 1):
            (places,) = np.nonzero(segments == segment)
            np.testing.assert_array_equal(batch["positions"][row, places], np.arange(len(places)))
            seen = {
                owner[t] for t in np.union1d(batch["tokens"][row, places], batch["targets"][row, places]) if t < BOS
            }
            assert len(seen) <= 1
            # A target is the next input of its own segment; bos opens documents and eos closes them, each on its side.
            np.testing.assert_array_equal(batch["targets"][row, places[:-1]], batch["tokens"][row, places[1:]])
            assert BOS not in batch["targets"][row, places]
            assert EOS not in batch["tokens"][row, places]


@quick
@given(lengths=documents_of, length=st.integers(1, 32))
def test_padding_is_only_behind_the_last_pair(lengths: list[int], length: int) -> None:
    batch = pack(make(lengths), length)
    weights = batch["weights"].reshape(-1)
    pairs = sum(lengths) + len(lengths)
    np.testing.assert_array_equal(weights, (np.arange(len(weights)) < pairs).astype(np.float32))
    assert len(weights) - pairs < length
    for name in ("tokens", "targets", "segment_ids", "positions", "target_bytes"):
        assert not batch[name].reshape(-1)[pairs:].any()


@quick
@given(lengths=documents_of, room=st.lists(st.integers(1, 20), min_size=1, max_size=20), cut=st.integers(0, 19))
def test_a_stream_continues_from_its_two_integers(lengths: list[int], room: list[int], cut: int) -> None:
    documents = make(lengths)
    whole = DocumentStream(documents.__getitem__, 0, 1, end=len(documents))
    for size in room[:cut]:
        whole.take(size)
    again = DocumentStream(documents.__getitem__, whole.position, 1, whole.offset, end=len(documents))
    for size in room[cut:]:
        expected, found = whole.take(size), again.take(size)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one, other)


class Held:
    """Holds documents in memory."""

    def __init__(self, contents: list[bytes], known: bool = True):
        self.contents = contents
        self.sizes = np.array([len(content) for content in contents]) if known else None

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, index: int) -> bytes:
        return self.contents[index]

    def ends(self, index: int) -> bool:
        return index % 3 != 2  # some documents are blocks that go on


@quick
@given(texts=st.lists(st.text(alphabet="ab \néƒ😀", max_size=120), min_size=1, max_size=5), size=st.integers(1, 50))
def test_pieces_add_up_to_their_documents_and_cut_no_character(texts: list[str], size: int) -> None:
    held = Held([text.encode() for text in texts])
    pieces = Pieces(held, size)
    got = [pieces[index] for index in range(len(pieces))]
    assert b"".join(piece.content for piece in got if isinstance(piece.content, bytes)) == b"".join(held.contents)
    for piece in got:
        assert isinstance(piece.content, bytes)
        piece.content.decode()
        assert len(piece.content) <= 3 * size + 4 or len(pieces) >= 64
    assert sum(piece.ends for piece in got) == sum(held.ends(index) for index in range(len(held)))


def test_documents_of_unknown_size_and_those_for_validation_stay_whole() -> None:
    text = b"line\n" * 100
    whole = Piece(text, True)
    assert [Pieces(Held([text], known=False), 10)[0], Pieces(Held([text]), None)[0]] == [whole, whole]
    assert len(Pieces(Held([text]), 10)) == 50
    assert len(Pieces(Held([text * 10]), 10)) == 64
