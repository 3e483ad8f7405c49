"""Prompts: from what requests say to what travels. Text becomes tokens beside the event loop, stages put items among
them, and what several requests share is made once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.core.interfaces.client import AnnotatedPrompt, EmbedRequest, GenerateRequest
from pegboard.toolkit.text.encoding import Ranges, Text, encode_each, encode_now

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.frontend.intake import Intake, Prompt
    from pegboard.core.interfaces.frontend import Expand, Held, PromptExpander
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.toolkit.http.budget import Budget

Asked = GenerateRequest | EmbedRequest

LONG_IDS = 16 * 1024
"""Token ids from which on a prompt is checked and packed in a thread, so that others' tokens keep flowing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A prompt as it travels: `ids` int32 little-endian, and `features` for stages, by their names. `tokens` of it are
    those of items, by kind. Requests need what is `held` until they have ended.
    """

    ids: bytes
    features: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    held: tuple[Held, ...] = ()

    def array(self) -> NDArray[np.int32]:
        """Return the ids as an array [length]."""
        return np.frombuffer(self.ids, "<i4")

    def complete(self, request: TokenizedRequest) -> TokenizedRequest:
        """Return the request with what stages send along with its prompt."""
        request.features.update(self.features)
        return request

    def keep(self) -> None:
        """Hold what is needed for one more request."""
        for one in self.held:
            one.keep()

    def drop(self) -> None:
        """Let go of what a request has kept that has ended."""
        for one in self.held:
            one.drop()


@dataclass(eq=False, slots=True)
class _Wanted:
    """One prompt, of one request or several that share it: as it was `stated`, and its text or tokens."""

    stated: Prompt | AnnotatedPrompt
    base: Prompt
    special: bool
    literals: Ranges = ()
    packed: Packed | None = None
    expanders: list[str] = field(default_factory=list)
    """Names of those that have something to put into it."""

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
    """Packs prompts for the engine that `intake` knows. `expanders` are those of stages, by their names."""

    def __init__(
        self,
        intake: Intake,
        tokenizer: Tokenizer,
        expanders: Mapping[str, PromptExpander] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._intake = intake
        self._tokenizer = tokenizer
        self._expanders = expanders or {}
        self._budget = budget

    @contextlib.asynccontextmanager
    async def packed(self, requests: Sequence[Asked], asker: str = "") -> AsyncIterator[list[Packed]]:
        """Pack the prompts of requests that belong together, in their order, and prepare their items in the turns of
        who asks. What is prepared stays as long as this lasts, and longer for requests that keep it. Raises
        InvalidRequest.
        """
        asked = self._asked(requests)
        wanted = list(dict.fromkeys(asked))
        await self._pack_all(wanted)
        async with contextlib.AsyncExitStack() as stack:
            for name, expander in self._expanders.items():
                mine = [one for one in wanted if name in one.expanders]
                if not mine:
                    continue
                prompts = [one.stated for one in mine]
                expands = await stack.enter_async_context(expander.prepared(prompts, asker))
                for one, expand in zip(mine, expands, strict=True):
                    await asyncio.to_thread(self._expand, name, one, expand)
            yield [one.done() for one in asked]

    @contextlib.contextmanager
    def packed_now(self, requests: Sequence[Asked]) -> Iterator[list[Packed]]:
        """As `packed`, in this thread."""
        asked = self._asked(requests)
        wanted = list(dict.fromkeys(asked))
        for one in wanted:
            self._pack(one, self._encode(one))
        with contextlib.ExitStack() as stack:
            for name, expander in self._expanders.items():
                mine = [one for one in wanted if name in one.expanders]
                if not mine:
                    continue
                expands = stack.enter_context(expander.prepared_now([one.stated for one in mine]))
                for one, expand in zip(mine, expands, strict=True):
                    self._expand(name, one, expand)
            yield [one.done() for one in asked]

    async def ids(self, prompt: AnnotatedPrompt, asker: str = "", *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the tokens of a prompt with its items, even if they exceed the context. Raises InvalidRequest as
        `packed`.
        """
        [one] = self._asked([GenerateRequest(prompt=prompt, add_special_tokens=add_special_tokens)])
        found = [ids async for _, ids in encode_each(self._tokenizer, _by_text([one]))]
        ids = found[0] if found else one.ids
        if not prompt.items:
            return ids
        array = np.array(ids, np.int64)
        async with contextlib.AsyncExitStack() as stack:
            for expander in self._expanders.values():
                if expander.takes(prompt, array):
                    [expand] = await stack.enter_async_context(expander.prepared([prompt], asker))
                    expanded = await asyncio.to_thread(expand, array)
                    array = array if expanded is None else expanded.ids
        listed: list[int] = array.tolist()
        return listed

    def _asked(self, requests: Sequence[Asked]) -> list[_Wanted]:
        """Return each request's prompt, a shared one as one object, after all checks that need no work."""
        known: dict[Hashable, _Wanted] = {}
        found = []
        for request in requests:
            one = self._stated(request)
            key = one.text or id(one.base)
            items = isinstance(one.stated, AnnotatedPrompt) and one.stated.items
            found.append(known.setdefault((key, items and id(request.prompt)), one))
            self._intake.check_text(one.base)
        if self._budget is not None:
            self._budget.check_texts(one.base for one in found if isinstance(one.base, str))
        return found

    def _stated(self, request: Asked) -> _Wanted:
        prompt: Prompt | AnnotatedPrompt = request.prompt
        special = request.add_special_tokens
        if not isinstance(prompt, AnnotatedPrompt):
            return _Wanted(prompt, prompt, special)
        if prompt.items and not self._expanders:
            raise prompt.refusal()
        if prompt.items and isinstance(request, EmbedRequest):
            raise prompt.refusal(embedding=True)
        for expander in self._expanders.values():
            expander.check(prompt)
        # Where no token stands for an item, there is nothing that a text could be taken for.
        return _Wanted(prompt, prompt.base, special, prompt.literals if self._expanders else ())

    def _encode(self, one: _Wanted) -> Sequence[int]:
        if not isinstance(one.base, str):
            return one.ids
        return encode_now(self._tokenizer, one.base, add_special_tokens=one.special, literals=one.literals)

    async def _pack_all(self, wanted: Sequence[_Wanted]) -> None:
        """Pack prompts without their items, one text at a time: tokens as numbers take ten times the memory."""
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
        """Pack a prompt without its items. Their places are checked: preparing items takes seconds."""
        one.packed = Packed(self._intake.pack(one.base, ids))
        array = one.packed.array()
        one.expanders = [name for name, expander in self._expanders.items() if expander.takes(one.stated, array)]
        if not one.expanders and isinstance(one.stated, AnnotatedPrompt) and one.stated.items:
            raise one.stated.refusal()

    def _expand(self, name: str, one: _Wanted, expand: Expand) -> None:
        """Put the items of a stage into a packed prompt."""
        packed = one.done()
        found = expand(packed.array())
        if found is None:
            return
        feature = msgspec.Raw(msgspec.msgpack.encode(found.feature))
        one.packed = Packed(
            self._intake.pack_expanded(found.ids, found.note),
            {**packed.features, name: feature},
            {**packed.tokens, **found.tokens},
            (*packed.held, *found.held),
        )


def _by_text(wanted: Sequence[_Wanted]) -> dict[Text, list[_Wanted]]:
    """Return which prompts have each text; those of token ids are left out."""
    texts: dict[Text, list[_Wanted]] = {}
    for one in wanted:
        if one.text is not None:
            texts.setdefault(one.text, []).append(one)
    return texts
