"""The suite, for every parser of this plugin."""

from __future__ import annotations

from pegboard.conformance.reasoning_parser import ReasoningParserContract


class TestDeepSeekR1(ReasoningParserContract):
    provider = "deepseek_r1"
    chat_template = "{{ content.split('</think>')[-1] }}<think>\n"
    begin, end = "<think>", "</think>"


class TestQwen3(ReasoningParserContract):
    provider = "qwen3"
    chat_template = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    begin, end = "<think>", "</think>"


class TestHarmony(ReasoningParserContract):
    provider = "harmony"
    chat_template = "<|channel|>analysis<|message|>"
    begin, end = "<|channel|>analysis<|message|>", "<|end|>"


class TestMarkers(ReasoningParserContract):
    provider = "marked"
    options = {"begin": "[THINK]", "end": "[/THINK]"}
    begin, end = "[THINK]", "[/THINK]"
