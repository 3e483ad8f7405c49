"""Drafts by looking for the newest tokens in what has been said before."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="spec_ngram",
    version="0.1.0",
    requires=("speculation",),
    summary="speculative decoding without a draft model: what followed the newest tokens before",
    providers=(
        Provider(
            contract="speculator",
            name="ngram",
            factory="pegboard.plugins.spec_ngram.speculator:NgramSpeculator",
            config="pegboard.plugins.spec_ngram.options:NgramOptions",
            provides=frozenset({"judges"}),
            summary="what followed the newest tokens where they stood before, in the request's own prompt and output",
        ),
    ),
)
