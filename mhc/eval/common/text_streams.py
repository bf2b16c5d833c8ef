"""Turn tokens into text as they come: characters whole, stop strings cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mhc.data.tokenizers import Tokenizer

_CONTEXT = 6  # tokens before a new one that decide how it is spelled


class TextStream(Protocol):
    """Gives the text of tokens that come one at a time. What is not a whole character yet is held back."""

    def push(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def end(self) -> str:
        """Return what was held back, as it is: U+FFFD for what never became a character."""
        ...


_STRAY = "\N{REPLACEMENT CHARACTER}"


class PieceStream:
    """Streams what tokens add to the text of those before them: in all, what decoding the whole gives.

    The last pieces that were told are decoded again together with the new ones; what comes out behind them is new.
    U+FFFD at the end is held back as long as it may become a character: bytes that are part of one are three at most.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._cut()
        self._told = 0  # characters of the text of _ids
        # What the tokens before give by themselves. They may end within a character.
        self._before = tokenizer.decode(self._ids)
        self._tell(self._before, len(self._before))

    def push(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        new = self._tell(text, len(text))
        if self._told == len(text) and len(self._ids) > 4 * _CONTEXT and self._cut():
            self._before = self._tokenizer.decode(self._ids)
            self._told = len(self._before)
        return new

    def end(self) -> str:
        """Return what was held back, as it is."""
        text = self._tokenizer.decode(self._ids)
        self._pass(text, len(text))
        self._told, new = len(text), text[self._told :]
        return new

    def _tell(self, text: str, end: int) -> str:
        while end and len(text) - end < 3 and text[end - 1] == _STRAY:
            end -= 1
        self._pass(text, end)
        start, self._told = self._told, max(self._told, end)
        return text[start:end]

    def _pass(self, text: str, end: int) -> None:
        """Skip the text that the earlier tokens gave by themselves and still give."""
        end = min(end, len(self._before))
        while self._told < end and text[self._told] == self._before[self._told]:
            self._told += 1
        if self._told < end:
            self._before = self._before[: self._told]  # the rest of it became another character

    def _cut(self) -> bool:
        """Forget ids far from the end, those before one that opens a character; return whether any were."""
        for index in range(len(self._ids) - _CONTEXT, 0, -1):
            if self._tokenizer.starts(self._ids[index]):
                self._ids = self._ids[index:]
                return True
        return False


def text_stream(tokenizer: Tokenizer, before: Sequence[int]) -> TextStream:
    """Return the stream of what follows the tokens ``before``."""
    return PieceStream(tokenizer, before)


class StopStrings:
    """Passes text on that comes in pieces, up to a stop string. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def push(self, text: str) -> str:
        """Return the text that is certain now and was not before."""
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        held = max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return the text that was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        return text


class Row:
    """Collects what follows one prompt, as it comes: ``text``, ``tokens``, and the ``reason`` why it ends."""

    def __init__(self, stream: TextStream, stops: Sequence[str], stop_tokens: frozenset[int], limit: int) -> None:
        self._stream, self._strings = stream, StopStrings(stops)
        self._stop_tokens, self._limit = stop_tokens, limit
        self.tokens: list[int] = []
        self.trace: list[dict[str, Any]] = []  # what was seen before each token that was drawn, where it is asked for
        self.text = ""
        self.reason: str | None = None  # None: not at its end

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now and was not before."""
        if token in self._stop_tokens:
            return self._end("token", "")
        self.tokens.append(token)
        new = self._strings.push(self._stream.push(token))
        if self._strings.found:
            self.reason = "stop"
        elif len(self.tokens) == self._limit:
            return self._end("length", new)
        self.text += new
        return new

    def _end(self, reason: str, new: str) -> str:
        new += self._strings.push(self._stream.end())
        new += self._strings.end()
        self.reason = "stop" if self._strings.found else reason
        self.text += new
        return new
