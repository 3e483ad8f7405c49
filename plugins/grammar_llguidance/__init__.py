"""Grammars by llguidance: an Earley parser over a lexer of regular expressions that is built while it runs."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="grammar_llguidance",
    version="0.1.0",
    summary="grammars by llguidance",
    requires=("grammar",),
    providers=(
        Provider(
            contract="grammar",
            name="llguidance",
            factory="pegboard.plugins.grammar_llguidance.backend:LLGuidanceBackend",
            summary="JSON schemas, regular expressions, EBNF and structural tags, compiled in milliseconds",
            config="pegboard.plugins.grammar_llguidance.options:LLGuidanceOptions",
            provides=frozenset(
                {"json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of", "rollback", "jump_ahead"}
            ),
            rank=20,
        ),
    ),
    extras={"llguidance": "pip install 'pegboard[llguidance]'"},
)
