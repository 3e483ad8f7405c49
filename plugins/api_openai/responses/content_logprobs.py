"""Logprobs of an answer's content, and of nothing else: thinking, calls and markers have tokens, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.toolkit.text.detokenize import IncrementalDetokenizer

if TYPE_CHECKING:
    from pegboard.toolkit.text.detokenize import TokenDecoder

Entry = dict[str, object]
"""What OpenAI's API says of one token."""


class TextByToken:
    """Cuts an answer's text where its tokens end, however it comes."""

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._waiting: deque[tuple[int, Entry]] = deque()
        """Tokens whose text has not come, and how many characters of the answer there are with each."""
        self._decoded = 0
        self._text, self._at = "", 0
        self._told = 0

    def feed(self, text: str, tokens: Sequence[int], entries: Sequence[Entry]) -> Iterator[tuple[str, Entry]]:
        """Yield each token's text, and its entry. Tokens may come before their text, which may be held back."""
        for token, entry in zip(tokens, entries, strict=True):
            self._decoded += len(self._detokenizer.push([token]))
            if token not in self._skipped:
                self._waiting.append((self._decoded, entry))
        self._text, self._at = self._text[self._at :] + text, 0
        while self._waiting and self._waiting[0][0] <= self._told + self._left:
            end, entry = self._waiting.popleft()
            yield self._take(end - self._told), entry

    def finish(self) -> Iterator[tuple[str, Entry]]:
        """Yield what is left at the end: a token that a stop string has cut. Tokens without text are left out."""
        if self._left and self._waiting:
            yield self._take(self._left), self._waiting[0][1]

    def rest(self) -> str:
        """Return the text that no token stands for, if any."""
        return self._take(self._left)

    @property
    def _left(self) -> int:
        """Characters that no token has been told of."""
        return len(self._text) - self._at

    def _take(self, length: int) -> str:
        piece = self._text[self._at : self._at + length]
        self._at, self._told = self._at + len(piece), self._told + len(piece)
        return piece


class ContentEntries:
    """Entries of the tokens that have been parsed and may be content."""

    def __init__(self) -> None:
        self._pieces: list[tuple[str, Entry]] = []

    def add(self, text: str, entry: Entry) -> None:
        """Add a token, which goes to the parser next."""
        self._pieces.append((text, entry))

    def clear(self) -> None:
        """Leave out what has been added: it is of something else."""
        self._pieces.clear()

    def take(self, content: str) -> list[Entry]:
        """Return the entries of `content`, the next text that the parser tells. Those of the text before it are left
        out: markers, and white space around them. Later ones are kept.
        """
        raw = "".join(text for text, _ in self._pieces)
        # A parser may put a line break before it.
        found = content if content in raw else content.strip()
        first = raw.rfind(found)
        if first < 0:
            first, found = 0, raw
        last, at, kept = first + len(found), 0, 0
        entries: list[Entry] = []
        for text, entry in self._pieces:
            if at >= last:
                break
            # The first bytes of a character have no text yet.
            if at + len(text) > first or (not text and at == first):
                entries.append(entry)
            at += len(text)
            kept += 1
        del self._pieces[:kept]
        return entries
