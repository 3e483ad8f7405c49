"""Constrained decoding: outputs that follow a grammar, and the contract of what compiles grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.grammar.api import GrammarBackend, GrammarContext

GRAMMAR: Contract[GrammarBackend, GrammarContext] = Contract(
    "grammar",
    "grammar",
    Cardinality.MATCHED,
    "pegboard.plugins.grammar.api:GrammarBackend",
    "compiles grammars and says which tokens may come next",
    suite="pegboard.plugins.grammar.suite:GrammarContract",
    capabilities={
        "json_schema": "JSON that satisfies a schema",
        "json_object": "any JSON object",
        "regex": "what a regular expression matches",
        "ebnf": "what an EBNF grammar (GBNF) derives",
        "structural_tag": "free text with structures in it that follow a trigger, or structures alone",
        "any_of": "what one of several grammars allows, of any kinds that it declares",
        "rollback": "takes accepted tokens back",
        "jump_ahead": "names tokens that must come next",
    },
    section="pegboard.plugins.grammar.options:GrammarSection",
)

plugin = Plugin(
    name="grammar",
    version="0.1.0",
    other_servers="pegboard.plugins.grammar:other_servers.yaml",
    summary="outputs that follow a grammar",
    contracts=(GRAMMAR,),
    hooks=("pegboard.plugins.grammar.hooks:GrammarHooks",),
)
