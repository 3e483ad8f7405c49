"""No grammars: requests with one are refused."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="grammar_none",
    version="0.1.0",
    summary="switches constrained decoding off",
    requires=("grammar",),
    providers=(
        Provider(
            contract="grammar",
            name="none",
            factory="pegboard.plugins.grammar_none.backend:NoGrammars",
            summary="no grammars at all: requests with one are refused",
            rank=0,
        ),
    ),
)
