"""Calls as Gemma 4 writes them, with keys without quotes, and strings between tokens of their own::

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>

Source: https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4. A string is exactly what stands between its
tokens: there are no escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pegboard.core.interfaces.json_value import JsonValue
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import chosen
from pegboard.plugins.parsers_tools.literals import GEMMA_RULES, LiteralForm, literal_calls
from pegboard.plugins.parsers_tools.pythonic import PythonicStream, plain_json
from pegboard.toolkit.parsing.json_stream import Tell
from pegboard.toolkit.parsing.output_parser import (
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading

_CALL, _CALL_END, _RESPONSE = "<|tool_call>", "<tool_call|>", "<|tool_response>"
_QUOTE = '<|"|>'
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_KEY = re.compile(r"[^:,{}\[\]<\"'\n]+")
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_VALUE = re.compile(r"[^,{}\[\]<\n]+")
"""A string whose tokens were forgotten, a number or a word."""
_MOST = 128
_MAX_BARE = 1000


class GemmaParser(OutputParser[NoOptions]):
    """Gemma 4."""

    skip_special_tokens = False
    call_markers = (_CALL,)

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if f"{_CALL}call:" in ctx.chat_template else f"the chat template has no {_CALL}call:"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _GemmaStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        if not required:
            return None
        form = LiteralForm(
            call=f"{_CALL}call:{{name}}{{",
            call_end=f"}}{_CALL_END}",
            key="{name}:",
            comma=",",
            rules=GEMMA_RULES,
            literal=_literal,
            key_text=_key,
        )
        return Grammar("ebnf", literal_calls(chosen(tools, name), form, parallel=parallel))

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_CALL,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return "".join(f"{_CALL}call:{one['name']}{_literal(one['arguments'])}{_CALL_END}" for one in calls)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else f"{_QUOTE}{name}{_QUOTE}"


def _literal(value: JsonValue) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_key(key)}:{_literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    return json.dumps(value)


class _GemmaStream(PythonicStream):
    def run(self) -> Reading[None]:
        markers: tuple[str, ...] = (_CALL,)
        while marker := (yield from self.content(*markers)):
            if marker != _CALL:
                self.leave_out_marker()
                continue
            called = yield from self.attempt(self._marked(), _CALL_END)
            markers = (_CALL, _CALL_END, _RESPONSE) if called else (_CALL,)

    def _marked(self) -> Reading[None]:
        """Read ``call:name{key:value,...}``. It is told as soon as its arguments begin."""
        source = self.source
        yield from source.skip_space()
        if not (yield from source.read_marker("call:")):
            raise Broken
        yield from source.skip_space()
        name = yield from source.read_run(_NAME, _MOST)
        self.check(name)
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Broken
        self.start(name)
        yield from self.read_literal(self.sink.arguments)
        self.sink.end()

    def read_key(self, tell: Tell) -> Reading[None]:
        source = self.source
        if (yield from source.peek()) in ("'", '"', "<"):
            yield from self.read_scalar(tell, source.text[source.at])
        else:
            name = (yield from source.read_run(_KEY, _MOST)).strip()
            if not name or len(name) > _MOST:
                tell(name)
                raise Broken
            tell(json.dumps(name, ensure_ascii=False))
        yield from source.skip_space()
        yield from source.expect(":")
        tell(": ")
        yield from source.skip_space()

    def read_scalar(self, tell: Tell, char: str) -> Reading[None]:
        if char in ("'", '"'):
            yield from super().read_scalar(tell, char)
            return
        if char != "<":
            yield from self._bare(tell)
            return
        if not (yield from self.source.read_marker(_QUOTE)):
            raise Broken
        tell('"')
        end = yield from self.until(lambda text: tell(json.dumps(text, ensure_ascii=False)[1:-1]), _QUOTE)
        self.source.stop_record()
        if not end:
            raise Broken
        tell('"')

    def _bare(self, tell: Tell) -> Reading[None]:
        text = yield from self.source.read_run(_VALUE, _MAX_BARE)
        bare = text.rstrip()
        if not bare or len(text) > _MAX_BARE:
            tell(text)
            raise Broken
        tell(plain_json(bare) or json.dumps(bare, ensure_ascii=False))
