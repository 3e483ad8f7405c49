"""Budgets: the cost of a request for the API process, computed from its fields before anything is built.

Single fields have bounds of their own; what hurts is their products: answers x tokens x log-probabilities, answers x
stop expressions x states. They are counted here in two currencies, bytes of memory and steps of stop automata per
character of output, and bounded per HTTP request (400: ask for less) and for all in progress (503: try again).
Every request has a share of both for free. What is within is not charged, so costly requests never keep it waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import Price
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.stops import CompiledStops
from pegboard.toolkit.text.stop import Stops, compiled

FREE = Price()
Prices = Callable[[TokenizedRequest], Price]
"""What stages say that an answer will cost."""

ENTRY_BYTES = 320
"""One log-probability: numbers in a tuple as it arrives, the object it becomes in an answer, and its JSON."""
NUMBER_BYTES = 64
"""One number of a hidden state or an embedding, on the same way."""
PROMPT_BYTES = 12
"""One token of a prompt on its way to the scheduler."""
TEXT_BYTES = 24
"""One character of the text that is becoming tokens: what the tokenizer holds, and the tokens as numbers."""
WAITING_BYTES = 4
"""One character of a text whose turn comes before or after: its tokens, packed, of which there are hardly more than
characters. The text itself counts as part of its body."""
SETTING_BYTES = 128
"""One entry of `logit_bias`, in both processes."""
ID_BYTES = 32
"""One token id of a parameter."""
CHAR_BYTES = 4
"""One character, or byte, of stop strings and of parameters of plugins and their stages."""
REQUEST_BYTES = 8 * 1024
"""The objects of one answer, whatever it asks for."""
FREE_BYTES = 256 * 1024
"""What every HTTP request has for free."""
FREE_STEPS = 16
"""What every answer has for free."""
CHARS_PER_STEP = 16
"""Characters of what stages match in texts that cost one step more, once for all answers that have them: each process
compiles them, and a long one may have few states. A state takes about 1 microsecond, so many characters up to 16."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Most that one HTTP request may cost, and all in progress together: bytes, and steps per character."""

    request_bytes: int = 64 * 2**20
    total_bytes: int = 192 * 2**20
    request_steps: int = 4096
    total_steps: int = 8192


@dataclass(frozen=True, slots=True)
class Demand:
    """What the requests of one HTTP request ask for together, in numbers of things."""

    answers: int = 0
    prompt_tokens: int = 0
    entries: int = 0
    """Log-probabilities, of prompts and of outputs as long as they may become."""
    numbers: int = 0
    """Of hidden states and embeddings."""
    steps: int = 0
    settings: int = 0
    """Bytes of sampling parameters of those of plugins, and of what stages send along with prompts."""

    @classmethod
    def of(cls, requests: Sequence[TokenizedRequest], price: Prices) -> Demand:
        """Count. Nothing is built but the automata of stops that are not compiled yet."""
        prompts = entries = numbers = steps = settings = 0
        known: dict[int, int] = {}
        met: set[tuple[Stops, tuple[CompiledStops, ...]]] = set()
        for one in requests:
            length, longest = len(one.prompt) // 4, one.sampling.max_new_tokens or 0
            prompts += length
            if one.logprobs is not None:
                entries += longest * _entries_per_token(one)
            found = FREE
            if one.features:
                found = price(one)
                settings += sum(map(len, one.features.values()))
                entries, numbers = entries + found.entries, numbers + found.numbers + longest * found.numbers_per_token
            if one.sampling.stop or found.stops:
                stops = (compiled(one.sampling.stop), found.stops)
                steps += stop_steps(*stops, first=stops not in met)
                met.add(stops)
                settings += CHAR_BYTES * sum(other.chars for other in found.stops)
            settings += CHAR_BYTES * found.chars
            settings += _settings_bytes(one, known)
        return cls(len(requests), prompts, entries, numbers, steps, settings)

    @property
    def whole_bytes(self) -> int:
        """Memory that they take."""
        whole = self.answers * REQUEST_BYTES + self.prompt_tokens * PROMPT_BYTES
        return whole + self.entries * ENTRY_BYTES + self.numbers * NUMBER_BYTES + self.settings

    @property
    def bytes(self) -> int:
        """What of it is beyond what is free."""
        return max(0, self.whole_bytes - FREE_BYTES)


@dataclass(eq=False, slots=True)
class Bill:
    """What one HTTP request has been charged."""

    refunds: list[Callable[[], None]] = field(default_factory=list)

    def settle(self) -> None:
        """Give it back: the answer has left."""
        refunds, self.refunds = self.refunds, []
        for refund in refunds:
            refund()


BILL: ContextVar[Bill | None] = ContextVar("bill", default=None)
"""The bill of the HTTP request that is being served. Outside of one, only the bounds of a single request hold."""


class Budget:
    """The accounts of one API process, for its event loop."""

    def __init__(self, limits: BudgetLimits | None = None) -> None:
        self.limits = limits or BudgetLimits()
        self.bytes = 0
        """Charged now."""
        self.steps = 0

    def check_texts(self, texts: Iterable[str]) -> None:
        """Refuse more text than one request may have, before it becomes tokens, which one text does at a time. Equal
        texts count once. Raises InvalidRequest (400). Nothing is charged: their tokens are, once they can be counted.
        """
        lengths = [len(text) for text in set(texts)]
        longest, whole = max(lengths, default=0), sum(lengths)
        size = longest * TEXT_BYTES + (whole - longest) * WAITING_BYTES
        if size > self.limits.request_bytes:
            what = f"texts of {whole:,} characters, of which the longest has {longest:,}, take about "
            what += (
                f"{size / 2**20:,.0f} MiB to become tokens, more than the {self.limits.request_bytes / 2**20:,.0f} MiB"
            )
            raise _too_costly(what, "request_bytes", "prompt")

    def charge_texts(self, texts: Iterable[str]) -> None:
        """Charge texts whose tokens are the answer, all of them together. Raises InvalidRequest as `charge` does."""
        length, most = sum(map(len, set(texts))), self.limits.request_bytes // TEXT_BYTES
        if length > most:
            raise _too_costly(f"{length:,} characters of text are more than the {most:,}", "request_bytes", "prompt")
        self._charge(max(0, length * TEXT_BYTES - FREE_BYTES), 0)

    def charge_answer(self, size: int) -> None:
        """Charge an answer that the engine has no part in. Raises InvalidRequest as `charge` does."""
        most = self.limits.request_bytes
        if size > most:
            what = f"the answer would take about {size / 2**20:,.0f} MiB, more than the {most / 2**20:,.0f} MiB"
            raise _too_costly(what, "request_bytes", None)
        self._charge(max(0, size - FREE_BYTES), 0)

    def fit(
        self, asked: Sequence[GenerateRequest | EmbedRequest], prepared: list[TokenizedRequest], price: Prices
    ) -> list[TokenizedRequest]:
        """Shorten answers whose length the client has left open, so that `charge` takes them: they share alike what the
        rest leaves of `request_bytes`. Each keeps one token, whatever that costs.
        """
        prices = {
            i: token
            for i, (one, made) in enumerate(zip(asked, prepared, strict=True))
            if isinstance(one, GenerateRequest)
            and one.sampling.max_new_tokens is None
            and (token := _token_bytes(made, price))
        }
        if not prices:
            return prepared
        rest = Demand.of([_cut(one, 0) if i in prices else one for i, one in enumerate(prepared)], price)
        left = self.limits.request_bytes + FREE_BYTES - rest.whole_bytes - sum(prices.values())
        share = max(0, left) // len(prices)
        return [_cut(one, 1 + share // prices[i]) if i in prices else one for i, one in enumerate(prepared)]

    def charge(self, demand: Demand) -> None:
        """Charge the HTTP request that is being served. Raises InvalidRequest: 400 for more than one request may have,
        503 where others have it just now.
        """
        limits, size, steps = self.limits, demand.bytes, demand.steps
        if size > limits.request_bytes:
            what = f"this asks for about {size / 2**20:,.0f} MiB ({_told(demand)}), more than the "
            what += f"{limits.request_bytes / 2**20:,.0f} MiB"
            raise _too_costly(what, "request_bytes", "logprobs" if demand.entries else None)
        self.check_steps(steps)
        self._charge(size, steps)

    def check_steps(self, steps: int) -> None:
        """Raise InvalidRequest (400) for stops that take more steps than those of one request may. Nothing is charged;
        from any thread.
        """
        most = self.limits.request_steps
        if steps > most:
            what = f"the stop strings and expressions of all answers take {steps:,} steps per character or more, "
            raise _too_costly(f"{what}which is above the {most:,}", "request_steps", "stop")

    def _charge(self, size: int, steps: int) -> None:
        limits, bill = self.limits, BILL.get()
        if bill is None or not (size or steps):
            return
        if self.bytes + size > limits.total_bytes or self.steps + steps > limits.total_steps:
            raise InvalidRequest(
                "other requests have all that this server keeps for costly ones (server.budget); try again later",
                code="over_budget",
                status=503,
            )
        self.bytes += size
        self.steps += steps

        def refund() -> None:
            self.bytes -= size
            self.steps -= steps

        bill.refunds.append(refund)


def stop_steps(stops: Stops, others: Sequence[CompiledStops], *, first: bool = False) -> int:
    """Return what the stops of one answer are charged; `first` for one of the answers that share them."""
    compiling = sum(one.chars for one in others) // CHARS_PER_STEP if first else 0
    return max(0, len(stops.strings) + sum(one.steps for one in others) + compiling - FREE_STEPS)


def _entries_per_token(request: TokenizedRequest) -> int:
    return 1 + (request.logprobs or 0) + len(request.token_ids_logprob)


def _token_bytes(request: TokenizedRequest, price: Prices) -> int:
    """Return what another token of this answer costs."""
    entries = 0 if request.logprobs is None else _entries_per_token(request)
    return entries * ENTRY_BYTES + price(request).numbers_per_token * NUMBER_BYTES


def _cut(request: TokenizedRequest, longest: int) -> TokenizedRequest:
    """Return the request with an answer of so many tokens at most."""
    sampling = request.sampling
    longest = min(longest, sampling.max_new_tokens or 0)
    least = min(sampling.min_new_tokens, longest)
    sampling = msgspec.structs.replace(sampling, max_new_tokens=longest, min_new_tokens=least)
    return msgspec.structs.replace(request, sampling=sampling)


def _settings_bytes(request: TokenizedRequest, known: dict[int, int]) -> int:
    """Size of a request's parameters. `known` has those of the mappings that several requests share, by their ids."""
    sampling = request.sampling
    size = SETTING_BYTES * len(sampling.logit_bias)
    size += ID_BYTES * (len(sampling.stop_token_ids) + len(request.token_ids_logprob))
    size += CHAR_BYTES * sum(map(len, sampling.stop))
    for values in (sampling.extra, request.params):
        if values:
            if id(values) not in known:
                known[id(values)] = len(msgspec.json.encode(values))
            size += CHAR_BYTES * known[id(values)]
    return size


def _told(demand: Demand) -> str:
    counts = {
        "answers": demand.answers,
        "prompt tokens": demand.prompt_tokens,
        "log-probabilities": demand.entries,
        "numbers of vectors": demand.numbers,
        "bytes of parameters": demand.settings,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _too_costly(what: str, key: str, param: str | None) -> InvalidRequest:
    text = f"{what} that one request may have (server.budget.{key}): ask for fewer or shorter things at a time"
    return InvalidRequest(text, param=param, code="request_too_costly")
