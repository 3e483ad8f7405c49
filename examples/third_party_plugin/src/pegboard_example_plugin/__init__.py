"""The plugin's record. It is read whenever plugins are listed, so it imports nothing heavy: all else stands in strings.

`conformance` names the test classes by which `pegboard plugins check` checks a provider.
"""

from pegboard.core.interfaces import Plugin, Provider

_OPTIONS = "pegboard_example_plugin.options"
_TESTING = "pegboard_example_plugin.testing"

plugin = Plugin(
    name="example",
    version="1.0.0",
    summary="one provider each of eight contracts, to start your own from",
    requires=("speculation",),
    providers=(
        Provider(
            contract="schedule_policy",
            name="shortest_prompt",
            factory="pegboard_example_plugin.policy:ShortestPromptPolicy",
            config=f"{_OPTIONS}:ShortestPromptOptions",
            summary="shortest prompt first, then by arrival",
            conformance=(f"{_TESTING}:TestShortestPrompt", f"{_TESTING}:TestShortestPromptInSteps"),
        ),
        Provider(
            contract="prefix_cache",
            name="whole_prompt",
            factory="pegboard_example_plugin.cache:WholePromptCache",
            config=f"{_OPTIONS}:WholePromptOptions",
            summary="a dictionary from everything said so far to the page that ends there",
            provides=frozenset({"reuse"}),
            rank=-1,
            conformance=(f"{_TESTING}:TestWholePrompt", f"{_TESTING}:TestWholePromptOldestFirst"),
        ),
        Provider(
            contract="logits_processor",
            name="no_repeat",
            factory="pegboard_example_plugin.no_repeat:NoRepeat",
            config=f"{_OPTIONS}:NoRepeatOptions",
            summary="no sequence of so many tokens comes twice in an output",
            provides=frozenset({"params", "tokens_ahead"}),
            conformance=f"{_TESTING}:TestNoRepeat",
        ),
        Provider(
            contract="sampler",
            name="top_n_sigma",
            factory="pegboard_example_plugin.top_n_sigma:TopNSigma",
            config=f"{_OPTIONS}:TopNSigmaOptions",
            summary="draws from the tokens whose logits are within some standard deviations of the largest",
            provides=frozenset({"seeded", "params"}),
            rank=-1,
            conformance=f"{_TESTING}:TestTopNSigma",
        ),
        Provider(
            contract="speculator",
            name="bigrams",
            factory="pegboard_example_plugin.bigrams:Bigrams",
            config=f"{_OPTIONS}:BigramsOptions",
            summary="drafts what came after the newest two tokens when they stood there before",
            rank=-1,
            conformance=(f"{_TESTING}:TestBigrams", f"{_TESTING}:TestLongBigrams"),
        ),
        Provider(
            contract="admission_gate",
            name="rate_limit",
            factory="pegboard_example_plugin.rate_limit:RateLimit",
            config=f"{_OPTIONS}:RateLimitOptions",
            summary="so many requests per second and API key; a few more wait, the rest is refused",
            conformance=f"{_TESTING}:TestRateLimit",
        ),
        Provider(
            contract="api",
            name="completion_lines",
            factory="pegboard_example_plugin.router:CompletionLines",
            config=f"{_OPTIONS}:CompletionLinesOptions",
            summary="completions of texts, in lines of JSON",
            conformance=f"{_TESTING}:TestCompletionLines",
        ),
        Provider(
            contract="tool_parser",
            name="bracketed",
            factory="pegboard_example_plugin.parser:BracketedParser",
            config=f"{_OPTIONS}:BracketedOptions",
            summary="calls between two markers, such as [[now {}]]",
            provides=frozenset({"forces", "streams_arguments"}),
            rank=-1,
            conformance=(f"{_TESTING}:TestBracketed", f"{_TESTING}:TestOtherMarkers"),
        ),
    ),
)
