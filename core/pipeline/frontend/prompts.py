"""Prompts: from what requests say to what travels. Text becomes tokens beside the event loop, media are prepared and
laid out among them, and what several requests share is made once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest, MediaPrompt
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.pipeline.frontend.intake import text_of
from pegboard.toolkit.text.encoding import Ranges, Text, encode_each, encode_now

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.client import MediaInput
    from pegboard.core.interfaces.media import MediaKind
    from pegboard.core.interfaces.messages import RequestMedia, TokenizedRequest
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.pipeline.frontend.intake import Intake, Prompt
    from pegboard.core.pipeline.frontend.media.frontend import MediaFrontend
    from pegboard.core.pipeline.frontend.media.process import PreparedItem
    from pegboard.core.pipeline.frontend.media.store import MediaFile
    from pegboard.toolkit.http.budget import Budget

Asked = GenerateRequest | EmbedRequest

LONG_IDS = 16 * 1024
"""Token ids from which on a prompt is checked and packed in a thread, so that others' tokens keep flowing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A prompt as it travels: `ids` int32 little-endian, and its media, of which `tokens` are part of it. They need
    `files` until the request has ended.
    """

    ids: bytes
    media: RequestMedia | None = None
    tokens: Mapping[MediaKind, int] = field(default_factory=dict)
    files: tuple[MediaFile, ...] = ()

    def array(self) -> NDArray[np.int32]:
        """Return the ids as an array [length]."""
        return np.frombuffer(self.ids, "<i4")

    def complete(self, request: TokenizedRequest) -> TokenizedRequest:
        """Return the request with its media."""
        return request if self.media is None else msgspec.structs.replace(request, media=self.media)

    def keep(self) -> None:
        """Have the files stay for one more request."""
        for file in self.files:
            file.keep()

    def drop(self) -> None:
        """Let go of the files: a request that kept them has ended."""
        for file in self.files:
            file.drop()


@dataclass(eq=False, slots=True)
class _Wanted:
    """One prompt, of one request or several that share it. `items` once they are prepared."""

    base: Prompt
    special: bool
    literals: Ranges = ()
    media: tuple[MediaInput, ...] = ()
    items: Sequence[PreparedItem] = ()
    packed: Packed | None = None

    @property
    def text(self) -> Text | None:
        """What is to become tokens; None where it is tokens."""
        return Text(self.base, self.special, self.literals) if isinstance(self.base, str) else None

    @property
    def ids(self) -> list[int]:
        """The tokens of one that came as tokens."""
        assert not isinstance(self.base, str)
        return self.base

    def done(self) -> Packed:
        """Return it as it travels, once it is packed."""
        assert self.packed is not None
        return self.packed


class Prompts:
    """Packs prompts for one engine, whose model and limits `intake` knows. `media` is None where it takes none."""

    def __init__(
        self, intake: Intake, tokenizer: Tokenizer, media: MediaFrontend | None = None, budget: Budget | None = None
    ) -> None:
        self._intake = intake
        self._tokenizer = tokenizer
        self._media = media
        self._budget = budget

    @contextlib.asynccontextmanager
    async def packed(self, requests: Sequence[Asked], asker: str = "") -> AsyncIterator[list[Packed]]:
        """Pack the prompts of requests that belong together, in their order, and prepare their media in the turns of
        who asks. Files of media stay as long as this lasts, and longer for requests that keep them. Raises
        InvalidRequest.
        """
        asked = self._asked(requests)
        wanted = list(dict.fromkeys(asked))
        await self._pack_all(wanted)
        async with self._prepared(wanted, asker):
            for one in wanted:
                if self._concerns(one):
                    await asyncio.to_thread(self._lay_out, one)
            yield [one.done() for one in asked]

    @contextlib.contextmanager
    def packed_now(self, requests: Sequence[Asked]) -> Iterator[list[Packed]]:
        """As `packed`, in this thread."""
        asked = self._asked(requests)
        wanted = list(dict.fromkeys(asked))
        for one in wanted:
            self._pack(one, self._encode(one))
        with contextlib.ExitStack() as stack:
            if (media := _media(wanted)) and self._media is not None:
                _deal(wanted, stack.enter_context(self._media.preparer.prepared_now(media)))
            for one in wanted:
                if self._concerns(one):
                    self._lay_out(one)
            yield [one.done() for one in asked]

    async def ids(self, prompt: MediaPrompt, asker: str = "", *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the tokens of a prompt with its media, whether the context has room for them or not. Raises
        InvalidRequest as `packed` does.
        """
        [one] = self._asked([GenerateRequest(prompt=prompt, add_special_tokens=add_special_tokens)])
        found = [ids async for _, ids in encode_each(self._tokenizer, _by_text([one]))]
        ids = found[0] if found else one.ids
        if self._media is None or not one.media:
            return ids
        self._media.layouts.check_places(ids, one.media)
        async with self._prepared([one], asker):
            laid_out = await asyncio.to_thread(self._media.lay_out, ids, one.media, one.items)
            expanded: list[int] = laid_out.ids.tolist()
            return expanded

    @contextlib.asynccontextmanager
    async def _prepared(self, wanted: Sequence[_Wanted], asker: str) -> AsyncIterator[None]:
        """Have prompts with their media."""
        if (media := _media(wanted)) and self._media is not None:
            async with self._media.preparer.prepared(media, asker) as items:
                _deal(wanted, items)
                yield
        else:
            yield

    def _asked(self, requests: Sequence[Asked]) -> list[_Wanted]:
        """Return the prompt of each request, one that several share as one object, checked as far as that goes
        before anything is done for it.
        """
        known: dict[Hashable, _Wanted] = {}
        found = []
        for request in requests:
            one = self._stated(request)
            key = one.text or id(one.base)
            found.append(known.setdefault((key, one.media and id(request.prompt)), one))
            self._intake.check_text(one.base)
        if self._budget is not None:
            self._budget.check_texts(one.base for one in found if isinstance(one.base, str))
        return found

    def _stated(self, request: Asked) -> _Wanted:
        prompt: Prompt | MediaPrompt = request.prompt
        special = request.add_special_tokens
        if self._media is None or not isinstance(prompt, MediaPrompt):
            return _Wanted(text_of(prompt), special)
        if isinstance(request, EmbedRequest) and prompt.media:
            raise InvalidRequest("there are no embeddings of pictures and videos", param="prompt", code="unsupported")
        self._media.check(prompt)
        return _Wanted(prompt.base, special, prompt.literals, prompt.media)

    def _encode(self, one: _Wanted) -> Sequence[int]:
        if not isinstance(one.base, str):
            return one.ids
        return encode_now(self._tokenizer, one.base, add_special_tokens=one.special, literals=one.literals)

    async def _pack_all(self, wanted: Sequence[_Wanted]) -> None:
        """Pack prompts, without their media. Of tokens as numbers, which take ten times the memory, there are one
        text's at a time.
        """
        texts = _by_text(wanted)
        async for text, ids in encode_each(self._tokenizer, texts):
            for one in texts[text]:
                await self._pack_beside(one, ids)
        for one in wanted:
            if one.packed is None:
                await self._pack_beside(one, one.ids)

    async def _pack_beside(self, one: _Wanted, ids: Sequence[int]) -> None:
        if len(ids) > LONG_IDS:
            await asyncio.to_thread(self._pack, one, ids)
        else:
            self._pack(one, ids)

    def _pack(self, one: _Wanted, ids: Sequence[int]) -> None:
        """Pack a prompt without its media. Its placeholders are counted: preparing media takes seconds."""
        one.packed = Packed(self._intake.pack(one.base, ids))
        if self._media is not None and self._concerns(one):
            self._media.layouts.check_places(ids, one.media)

    def _concerns(self, one: _Wanted) -> bool:
        """Return whether a packed prompt has anything to do with media."""
        return self._media is not None and bool(one.media or self._media.layouts.concern(one.done().array()))

    def _lay_out(self, one: _Wanted) -> None:
        """Put the media into a packed prompt."""
        assert self._media is not None
        found = self._media.lay_out(one.done().array().tolist(), one.media, one.items)
        if found.media is not None:
            packed = self._intake.pack_laid_out(found.ids, sum(found.tokens.values()))
            one.packed = Packed(packed, found.media, found.tokens, tuple(item.file for item in one.items))


def _by_text(wanted: Sequence[_Wanted]) -> dict[Text, list[_Wanted]]:
    """Return which prompts have each text; those of token ids are left out."""
    texts: dict[Text, list[_Wanted]] = {}
    for one in wanted:
        if one.text is not None:
            texts.setdefault(one.text, []).append(one)
    return texts


def _media(wanted: Sequence[_Wanted]) -> list[MediaInput]:
    return [media for one in wanted for media in one.media]


def _deal(wanted: Sequence[_Wanted], items: Sequence[PreparedItem]) -> None:
    """Give each prompt its items."""
    left = iter(items)
    for one in wanted:
        one.items = [next(left) for _ in one.media]
