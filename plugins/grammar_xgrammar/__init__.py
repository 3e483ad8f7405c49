"""Grammars by xgrammar: pushdown automata whose token masks are worked out when a grammar is compiled."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="grammar_xgrammar",
    version="0.1.0",
    summary="grammars by xgrammar",
    requires=("grammar",),
    providers=(
        Provider(
            contract="grammar",
            name="xgrammar",
            factory="pegboard.plugins.grammar_xgrammar.backend:XGrammarBackend",
            summary="JSON schemas, regular expressions, EBNF and structural tags, with masks that cost microseconds",
            config="pegboard.plugins.grammar_xgrammar.options:XGrammarOptions",
            provides=frozenset(
                {"json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of", "rollback", "jump_ahead"}
            ),
            rank=10,
        ),
    ),
    extras={"xgrammar": "pip install 'pegboard[xgrammar]'"},
)
