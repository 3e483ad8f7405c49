"""For the suites of output parsers: text in pieces, events put together, and texts that a grammar allows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.grammars import gbnf
from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputEvent,
    ParserStream,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass
class Told:
    """What a stream told in all. `order` has the kinds of events in a row, each once."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()

    @property
    def loaded(self) -> list[tuple[str, Any]]:
        """The calls with their arguments parsed. Fails for arguments that are no JSON object."""
        found = [(name, json.loads(arguments)) for name, arguments in self.calls]
        assert all(isinstance(arguments, dict) for _, arguments in found), self.calls
        return found


def told(events: Iterable[OutputEvent]) -> Told:
    """Return the events put together. Fails where they are out of order, empty, or of a call that has not begun."""
    content: list[str] = []
    reasoning: list[str] = []
    order: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
            assert event.text, "an event without text"
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
            assert event.text, "an event without text"
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls), f"call {event.index} begins after {len(calls)} others"
            calls.append((event.name, []))
        else:
            assert isinstance(event, ToolCallArguments)
            assert event.index == len(calls) - 1, "arguments of a call that is not the last one"
            calls[-1][1].append(event.text)
            assert event.text, "an event without text"
        kind = type(event).__name__.removesuffix("Arguments").removesuffix("Start")
        order += [kind] if not order or order[-1] != kind or isinstance(event, ToolCallStart) else []
    parts = tuple((name, "".join(pieces)) for name, pieces in calls)
    return Told("".join(content), "".join(reasoning), parts, tuple(order))


def feed(stream: ParserStream, pieces: Iterable[str]) -> Told:
    """Return a whole answer, in these pieces."""
    events: list[OutputEvent] = []
    for piece in pieces:
        events += stream.feed(piece)
    return told([*events, *stream.finish()])


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """`text` in pieces, some of them empty."""
    edges = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[low:high] for low, high in zip([0, *edges], [*edges, len(text)], strict=True)]


@st.composite
def garbled(draw: st.DrawFn, text: str) -> str:
    """`text` with some of it missing, doubled, or in between somewhere else."""
    for _ in range(draw(st.integers(0, 3))):
        low, high = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        part = draw(st.sampled_from(["", text[low:high] * 2, text[low:high][::-1], "x", '"', "\\", "}", "<", "\n"]))
        text = text[:low] + part + text[high:]
    return text


def grows_too_fast(make: Any, text: str) -> str:
    """Return why the time that a stream takes for `text`, over and over and a character at a time, is more than in
    proportion to its length; "" where it is not.

    Eight times the text in less than 24 times the time: what looks at everything again with each piece takes 64 times.
    The best of two counts, so that a busy machine is none the wiser.
    """

    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(2):
            stream = make()
            started = time.thread_time()
            for index in range(length):
                stream.feed(text[index % len(text)])
            stream.finish()
            best = min(best, time.thread_time() - started)
        return best

    short, long = seconds(2_000), seconds(16_000)
    return "" if long < 24 * short else f"{text[:40]!r}: 2000 characters took {short:.4f} s, 16000 took {long:.4f} s"


def sample(grammar: Grammar, seed: int) -> str:
    """Return a text that the grammar allows. Schemas may have `const`, `enum`, `anyOf`, types, and `$defs`."""
    rng = random.Random(seed)
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.source)
        return json.dumps(_value(_without_refs(schema, schema.get("$defs", {})), rng))
    if grammar.kind == "ebnf":
        return _Writer(gbnf.parse(grammar.source), rng).write()
    assert grammar.kind == "structural_tag", grammar.kind
    tag = json.loads(grammar.source)
    assert tag.get("at_least_one"), "the grammar does not force a call"
    count = 1 if tag.get("stop_after_first") else rng.randint(1, 3)
    chosen = [rng.choice(tag["structures"]) for _ in range(count)]
    texts = [one["begin"] + json.dumps(_value(one["schema"], rng)) + one["end"] for one in chosen]
    if "separator" in tag:
        if tag.get("trailing_separator") and count > 1 and rng.random() < 0.5:
            texts.append("")
        return f"{tag.get('begin', '')}{str(tag['separator']).join(texts)}{tag.get('end', '')}"
    assert all(any(one["begin"].startswith(trigger) for trigger in tag["triggers"]) for one in chosen)
    if tag.get("stop_after_first"):
        return str(texts[0])
    between = [rng.choice(["", "\n", "and then\n"]) for _ in texts]
    return "".join(text + free for text, free in zip(texts, between, strict=True))


def _without_refs(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with its definitions in their places; no definition may lead to itself."""
    if isinstance(node, Mapping):
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in definitions:
            return _without_refs(definitions[name], definitions)
        return {key: _without_refs(value, definitions) for key, value in node.items() if key != "$defs"}
    return [_without_refs(one, definitions) for one in node] if isinstance(node, list) else node


def _value(schema: Any, rng: random.Random) -> Any:
    if not isinstance(schema, Mapping) or not schema:
        return rng.choice([None, True, 5, "text"])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return _value(rng.choice(schema["anyOf"]), rng)
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        needed = schema.get("required", [])
        return {name: _value(one, rng) for name, one in properties.items() if name in needed or rng.random() < 0.5}
    if kind == "array":
        return [_value(schema.get("items", True), rng) for _ in range(rng.randint(0, 3))]
    simple = {"string": 'a "quoted" \\ word\n', "integer": -12, "number": 0.5, "boolean": False, "null": None}
    return simple[str(kind)]


class _Writer:
    """Texts of an EBNF grammar. What would nest without end is left out where it may be."""

    def __init__(self, rules: gbnf.Rules, rng: random.Random) -> None:
        self._rules = rules
        self._rng = rng

    def write(self) -> str:
        return self._node(self._rules[gbnf.START], 0)

    def _node(self, node: gbnf.Node, depth: int) -> str:
        if isinstance(node, gbnf.Literal):
            return node.text
        if isinstance(node, gbnf.Chars):
            return self._char(node)
        if isinstance(node, gbnf.Ref):
            return self._node(self._rules[node.name], depth + 1)
        if isinstance(node, gbnf.Repeat):
            most = node.least if depth > 8 else node.least + 2 if node.most is None else min(node.most, node.least + 2)
            return "".join(self._node(node.node, depth) for _ in range(self._rng.randint(node.least, most)))
        if isinstance(node, gbnf.Choice):
            return self._node(node.nodes[0] if depth > 8 else self._rng.choice(node.nodes), depth)
        return "".join(self._node(one, depth) for one in node.nodes)

    def _char(self, node: gbnf.Chars) -> str:
        if not node.negated:
            low, high = self._rng.choice(node.spans)
            return chr(self._rng.randint(low, high))
        allowed = [char for char in "ab {[(,'=😀" if not any(low <= ord(char) <= high for low, high in node.spans)]
        return self._rng.choice(allowed)


def one_by_one(text: str) -> Sequence[str]:
    """Return the text, a character at a time."""
    return list(text)
