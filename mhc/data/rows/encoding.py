"""Open a corpus for a tokeniser, and tokenise its documents."""

from __future__ import annotations

from collections.abc import Callable

import grain
import numpy as np

from mhc.config import DataConfig
from mhc.data.corpus import fidelity
from mhc.data.corpus.pieces import Piece, Pieces
from mhc.data.corpus.prepared import Prepared
from mhc.data.corpus.sources import Source, Split, each_source, open_source
from mhc.data.corpus.token_ids import TokenFiles
from mhc.data.rows.packing import Document
from mhc.data.shards.records import Tokenised
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError


def open_corpus(data: DataConfig, tokenizer: Tokenizer, split: Split) -> Source:
    """Open a split, as `open_source` does, and check it against the tokeniser and the sequence length.

    Raises:
      UserError: ids outside the vocabulary, data prepared with another tokeniser, a text that cannot be encoded, or a
        training split shorter than a sequence.
    """
    source = open_source(data, split)
    for part in each_source(source):
        if isinstance(part, TokenFiles):
            part.check_ids(tokenizer)
        if isinstance(part, Prepared):
            part.check_tokenizer(tokenizer)
    fidelity.check(source, tokenizer)
    if split == "train":
        encode = encoder(source, tokenizer)
        pairs = 0
        for index in range(len(source)):  # ends with the first document, as a rule
            pairs += len(encode(index).target_bytes)
            if pairs >= data.sequence_length:
                return source
        raise UserError(
            f"{source.label}: {pairs} tokens in its {len(source)} training document(s), "
            f"fewer than one sequence (data.sequence_length={data.sequence_length})"
        )
    return source


def encoder(source: Source, tokenizer: Tokenizer) -> Callable[[int], Document]:
    """Return a function from the number of a document to the document, whole and tokenised."""
    encode = Encode(tokenizer)
    whole = Pieces(source, None)
    return lambda index: encode.map(whole[index])


class Encode(grain.transforms.Map):
    """Tokenises a `Piece` into a `Document`. Raises UserError, with its file and place, where that is impossible."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def map(self, piece: Piece) -> Document:
        try:
            return self._document(piece)
        except UserError as error:
            raise UserError(f"{piece.name()}: {error}" if piece.name else str(error)) from None

    def _document(self, piece: Piece) -> Document:
        tokenizer = self._tokenizer
        rest = 0  # text that a tokeniser turned into no id at all: counted at eos, so that documents' bytes add up
        if isinstance(piece.content, bytes):
            ids, lengths = tokenizer.encode_with_bytes(piece.content)
            rest = len(piece.content) - int(lengths.sum())
        elif isinstance(piece.content, Tokenised):
            ids, rest = piece.content.ids, piece.content.rest
            known = piece.content.lengths
            lengths = tokenizer.byte_lengths[ids] if known is None else known.astype(np.int32)
        else:
            ids = piece.content
            lengths = tokenizer.bytes_of(ids, piece.begins)
        count = len(ids)
        tokens = np.empty(count + 2, np.int32)
        tokens[0], tokens[1:-1], tokens[-1] = tokenizer.bos_id, ids, tokenizer.eos_id
        target_bytes = np.empty(count + 1, np.int32)
        target_bytes[:-1], target_bytes[-1] = lengths, rest
        if piece.ends:
            return Document(tokens, target_bytes)
        return Document(tokens[:-1], target_bytes[:-1])
