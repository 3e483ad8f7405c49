"""The grammar backend that knows no grammar."""

from __future__ import annotations

from typing import NoReturn

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import GrammarBackend


class NoGrammars(GrammarBackend):
    """Declares no kind of grammar, so that no request with one gets as far as this, and no helper process is started.

    Automatically chosen where no other backend can work with the model's tokenizer.
    """

    def compile(self, grammar: Grammar) -> NoReturn:
        raise InvalidRequest(
            f"this server has no grammars (grammar.use: none), so no {grammar.kind}", param=grammar.kind
        )

    def load(self, grammar: Grammar, compiled: bytes) -> NoReturn:
        self.compile(grammar)
