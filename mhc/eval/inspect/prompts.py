"""Turn prompts into tokens, and tokens into labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhc.eval.common.prompts import check_text

if TYPE_CHECKING:
    from mhc.config import Config
    from mhc.data.tokenizers import Tokenizer


def tokenizer_of(config: Config) -> Tokenizer:
    """Return the tokeniser of a run."""
    from mhc.data import tokenizers

    return tokenizers.load(config.data.tokenizer)


def ids_of(tokenizer: Tokenizer, text: str, option: str) -> list[int]:
    """Return bos and the tokens of a prompt. Raises UserError, which names ``option``, for a text without UTF-8."""
    check_text(text, option)
    return [tokenizer.bos_id, *tokenizer.encode(text).tolist()]


def label_of(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's label for a picture: a space is ·, and a token that is no Latin text is its number."""
    if token in (tokenizer.bos_id, tokenizer.eos_id):
        return "bos" if token == tokenizer.bos_id else "eos"
    text = tokenizer.decode([token]).replace(" ", "·").replace("\n", "\\n").replace("\t", "\\t")
    latin = text and all(" " < character < "\u0250" and character != "\x7f" for character in text)
    return text if latin else f"#{token}"
