"""The suite, for every parser of this plugin."""

from __future__ import annotations

from pegboard.conformance.tool_parser import ToolParserContract


class TestHarmony(ToolParserContract):
    provider = "harmony"
    chat_template = "<|start|>assistant<|channel|>"


class TestHermes(ToolParserContract):
    provider = "hermes"
    chat_template = "{% if tools %}<tool_call>{% endif %}"


class TestLlama3(ToolParserContract):
    provider = "llama3_json"
    chat_template = "<|python_tag|>"
    leads = False


class TestMistral(ToolParserContract):
    provider = "mistral"
    chat_template = "[TOOL_CALLS]"


class TestMistralByName(ToolParserContract):
    provider = "mistral"
    chat_template = "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"


class TestPythonic(ToolParserContract):
    provider = "pythonic"
    chat_template = "[func_name1(params_name1=params_value1)]"
    leads = False


class TestQwen3Coder(ToolParserContract):
    provider = "qwen3_coder"
    chat_template = "<tool_call>\n<function=name>"


class TestDeepSeekV3(ToolParserContract):
    provider = "deepseek_v3"
    chat_template = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>```json"  # noqa: RUF001 - its own characters


class TestDeepSeekV31(ToolParserContract):
    provider = "deepseek_v3"
    chat_template = "<｜tool▁call▁begin｜>"  # noqa: RUF001 - its own characters
