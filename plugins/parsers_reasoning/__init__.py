"""Thinking aloud, as models that reason do it."""

from pegboard.core.interfaces.plugin import Plugin, Provider

_PARSERS = "pegboard.plugins.parsers_reasoning.parsers"
_OPTIONS = "pegboard.plugins.parsers_reasoning.options"

plugin = Plugin(
    name="parsers_reasoning",
    version="0.1.0",
    summary="thinking between <think> and </think>, or other markers",
    providers=(
        Provider(
            contract="reasoning_parser",
            name="harmony",
            factory="pegboard.plugins.parsers_reasoning.harmony:HarmonyParser",
            summary="the channel analysis of gpt-oss",
            rank=40,
        ),
        Provider(
            contract="reasoning_parser",
            name="gemma4",
            factory=f"{_PARSERS}:GemmaParser",
            summary="the channel thought of Gemma 4",
            rank=38,
        ),
        Provider(
            contract="reasoning_parser",
            name="hunyuan",
            factory=f"{_PARSERS}:HunyuanParser",
            summary="<think>...</think><answer>...</answer>",
            rank=36,
        ),
        Provider(
            contract="reasoning_parser",
            name="granite",
            factory=f"{_PARSERS}:GraniteParser",
            summary="Here is my thought process: ... Here is my response: ..., or <think> and <response>",
            rank=33,
        ),
        Provider(
            contract="reasoning_parser",
            name="qwen3",
            factory=f"{_PARSERS}:QwenParser",
            summary="<think>...</think> of models that may be told not to (enable_thinking)",
            rank=30,
        ),
        Provider(
            contract="reasoning_parser",
            name="deepseek_r1",
            factory=f"{_PARSERS}:ThinkParser",
            summary="<think>...</think>, which the prompt may have opened",
            config=f"{_OPTIONS}:ThinkOptions",
            rank=20,
        ),
        Provider(
            contract="reasoning_parser",
            name="marked",
            factory=f"{_PARSERS}:MarkedParser",
            summary="thinking between any two markers",
            config=f"{_OPTIONS}:MarkerOptions",
            rank=-1,
        ),
    ),
)
