"""In the process that takes requests: their grammars are checked and priced."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from pegboard.core.interfaces.client import EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage, Price
from pegboard.plugins.grammar.api import NAME
from pegboard.toolkit.grammars.grammar import parts_of

if TYPE_CHECKING:
    import msgspec

    from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.sampling import Grammar


class GrammarFrontend(FrontendStage):
    name = NAME
    fields = ("grammar",)

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> object | None:
        grammar = None if isinstance(request, EmbedRequest) else request.sampling.grammar
        if grammar is None:
            return None
        _check_kind(info, grammar.kind)
        for part in parts_of_union(grammar) if grammar.kind == "any_of" else ():
            _check_kind(info, part.kind)
        try:
            grammar.source.encode()
        except UnicodeEncodeError:
            text = f"{grammar.kind} holds lone surrogates, which are not valid Unicode"
            raise InvalidRequest(text, param=grammar.kind) from None
        return True

    def price(self, feature: msgspec.Raw, message: TokenizedRequest, info: ModelInfo) -> Price:
        grammar = message.sampling.grammar
        return Price(chars=0 if grammar is None else len(grammar.source))


def _check_kind(info: ModelInfo, kind: str) -> None:
    if f"{NAME}.{kind}" not in info.features:
        text = f"{kind}: this server does not have it; grammar.use must name a backend with {kind}"
        raise InvalidRequest(text, param=kind, code="not_available")


@lru_cache(maxsize=4)
def parts_of_union(grammar: Grammar) -> tuple[Grammar, ...]:
    """Return the parts of `any_of`: once, for all answers to a prompt."""
    return parts_of(grammar)
