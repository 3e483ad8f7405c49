"""Both halves: expressions are checked and priced where requests are taken, and compiled in each process that matches
them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pegboard.core.interfaces.client import EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage, Price
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.plugins.stop_expressions.matcher import RegexMatcher
from pegboard.plugins.stop_expressions.program import Program, StopRegexError

if TYPE_CHECKING:
    import msgspec

    from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.core.interfaces.stops import CompiledStops

NAME = "stop_expressions"


class Expressions:
    """The expressions of an answer, compiled. All answers that have the same ones share it."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.program = Program(patterns)
        self.steps = len(self.program.ops)
        self.chars = sum(map(len, patterns))

    def matcher(self) -> RegexMatcher:
        return RegexMatcher(self.program)


_in_use: WeakValueDictionary[tuple[str, ...], Expressions] = WeakValueDictionary()


@lru_cache(maxsize=64)
def compiled(patterns: tuple[str, ...]) -> Expressions:
    """Return the compiled form of these, made once however many answers have them: it is found as long as one of them
    is in use, and some that were used last besides. Raises StopRegexError for an expression that cannot be used.
    """
    found = _in_use.get(patterns)
    if found is None:
        found = _in_use[patterns] = Expressions(patterns)
    return found


class StopExpressions(Stage):
    name = NAME

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return Interest() if self.name in message.features else None

    def compile_stops(self, sampling: SamplingParams) -> CompiledStops | None:
        return compiled(sampling.stop_regex) if sampling.stop_regex else None


class ExpressionFrontend(FrontendStage):
    name = NAME
    fields = ("stop_regex",)

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> object | None:
        return None if isinstance(request, EmbedRequest) or not request.sampling.stop_regex else True

    def compile_stops(self, sampling: SamplingParams) -> CompiledStops | None:
        if not sampling.stop_regex:
            return None
        try:
            "".join(sampling.stop_regex).encode()
            return compiled(sampling.stop_regex)
        except UnicodeEncodeError:
            text = "stop_regex holds lone surrogates, which are not valid Unicode"
            raise InvalidRequest(text, param="stop_regex") from None
        except StopRegexError as error:
            raise InvalidRequest(f"stop_regex: {error}", param="stop_regex") from None

    def price(self, feature: msgspec.Raw, message: TokenizedRequest, info: ModelInfo) -> Price:
        return Price(stops=(compiled(message.sampling.stop_regex),))
