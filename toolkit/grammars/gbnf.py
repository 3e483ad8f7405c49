"""EBNF of requests: GBNF, the notation of llama.cpp's grammars, parsed into a tree for compilers.

root   ::= "yes" | "no" ("," ws reason)?     # a rule per name, alternatives, groups; the start rule is `root`
reason ::= [a-zA-Z ]{1,40} [^"\\n]* .          # character classes, any character but a line break, repetitions
ws     ::= " "+ | ""

A rule goes on until the next ``name ::=``, over as many lines as it likes. Escapes: ``\\n \\r \\t \\" \\\\ \\[ \\]``,
``\\- \\^ \\/`` and ``\\xHH \\uHHHH \\UHHHHHHHH``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.grammars.regex_length import MAX_FORCED

START = "root"
MAX_DEPTH = 64
"""How deep groups may be nested."""
MAX_REPEAT = 10_000
MAX_CHAR = 0x10FFFF

Span = tuple[int, int]
"""First and last code point."""


@dataclass(frozen=True, slots=True)
class Literal:
    """This text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these spans, or with `negated` one of all the others."""

    spans: tuple[Span, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """Whatever this rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same thing from `least` to `most` times; None: without end."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; empty: nothing at all."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these."""

    nodes: tuple[Node, ...]


Node = Literal | Chars | Ref | Repeat | Sequence | Choice
Rules = Mapping[str, Node]

ANY = Chars(((10, 10), (13, 13)), negated=True)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_HEAD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*[ \t]*::=")
_BLANK = re.compile(r"(?:\s+|#[^\n]*)+")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(,\s*(\d{1,9})?\s*)?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}


def parse(text: str, param: str = "ebnf") -> Rules:
    """Return the rules by name, `root` among them, each of which is defined and can come to an end.

    Raises InvalidRequest with the line for what is not a grammar, for rules that are missing or defined twice, for one
    that leads back to itself whatever is chosen, and for one that asks for enormous texts.
    """
    rules = _Parser(text, param).rules()
    if START not in rules:
        raise InvalidRequest(f"{param}: there is no rule {START!r}, where a grammar starts", param=param)
    for name, node in rules.items():
        for other in references(node):
            if other not in rules:
                raise InvalidRequest(
                    f"{param}: the rule {name!r} names {other!r}, which is defined nowhere", param=param
                )
    _check_ends(rules, param)
    return rules


def references(node: Node) -> Iterator[str]:
    """Yield names of the rules that a node mentions, as often as it does."""
    if isinstance(node, Ref):
        yield node.name
    elif isinstance(node, Repeat):
        yield from references(node.node)
    elif isinstance(node, (Sequence, Choice)):
        for one in node.nodes:
            yield from references(one)


def recursive(rules: Rules) -> frozenset[str]:
    """Return names of the rules from which `root` is made and that lead to themselves, at once or through others, or to
    one that does.
    """
    done: dict[str, bool] = {}
    graph = {name: tuple(dict.fromkeys(references(node))) for name, node in rules.items()}
    stack: list[tuple[str, int]] = [(START, 0)]
    path = {START}
    found: set[str] = set()
    while stack:
        name, at = stack.pop()
        children = graph[name]
        if at < len(children):
            stack.append((name, at + 1))
            child = children[at]
            if child in path:
                found.add(child)
            elif child not in done:
                path.add(child)
                stack.append((child, 0))
            continue
        path.discard(name)
        done[name] = True
    # A rule that mentions such a rule is not regular either.
    changed = bool(found)
    while changed:
        more = {name for name in done if name not in found and any(child in found for child in graph[name])}
        changed = bool(more)
        found |= more
    return frozenset(found)


def unrolled(rules: Rules) -> Rules:
    """Return the same grammar with repetitions for rules that end with themselves: ``a ::= x a | y`` is ``a ::= x* y``.

    A parser like Earley's keeps a place for every turn of such a rule, and none for a repetition.
    """
    return {name: _unrolled(name, node) for name, node in rules.items()}


def _unrolled(name: str, node: Node) -> Node:
    again, last = _by_end(name, node)
    if not again or not last or Sequence(()) in again:
        return node
    if any(_starts_with(name, one) for one in (*again, *last)):
        return node  # left recursion as well: it would become a repetition within a repetition
    return Sequence((Repeat(_either(again), 0, None), _either(last)))


def _by_end(name: str, node: Node) -> tuple[list[Node], list[Node]]:
    """Return the alternatives that end with the rule `name`, without it, and the others."""
    if node == Ref(name):
        return [Sequence(())], []
    if isinstance(node, Choice):
        parts = [_by_end(name, one) for one in node.nodes]
        return [one for again, _ in parts for one in again], [one for _, last in parts for one in last]
    if isinstance(node, Repeat) and (node.least, node.most) == (0, 1):
        again, last = _by_end(name, node.node)
        return again, [*last, Sequence(())] if again else [node]
    if isinstance(node, Sequence) and node.nodes:
        again, last = _by_end(name, node.nodes[-1])
        if again:
            head = node.nodes[:-1]
            return [_joined(head, one) for one in again], [_joined(head, one) for one in last]
    return [], [node]


def _starts_with(name: str, node: Node) -> bool:
    if isinstance(node, Choice):
        return any(_starts_with(name, one) for one in node.nodes)
    if isinstance(node, Sequence):
        return bool(node.nodes) and _starts_with(name, node.nodes[0])
    return node == Ref(name) or (isinstance(node, Repeat) and _starts_with(name, node.node))


def _joined(head: tuple[Node, ...], end: Node) -> Node:
    nodes = (*head, *end.nodes) if isinstance(end, Sequence) else (*head, end)
    return nodes[0] if len(nodes) == 1 else Sequence(nodes)


def _either(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))


def to_gbnf(rules: Rules) -> str:
    """Return the rules as text again, in the plainest spelling that every reader of GBNF understands."""
    return "\n".join(f"{name} ::= {_written(node)}" for name, node in rules.items()) + "\n"


def _written(node: Node) -> str:
    if isinstance(node, Literal):
        return f'"{"".join(_char(ord(c)) for c in node.text)}"'
    if isinstance(node, Chars):
        spans = "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in node.spans)
        return f"[{'^' if node.negated else ''}{spans}]"
    if isinstance(node, Ref):
        return node.name
    if isinstance(node, Repeat):
        inner = _written(node.node)
        if isinstance(node.node, (Repeat, Sequence)) or (isinstance(node.node, Literal) and len(node.node.text) != 1):
            inner = f"({inner})"
        return inner + times(node)
    if isinstance(node, Sequence):
        return " ".join(map(_written, node.nodes)) if node.nodes else '""'
    return f"({' | '.join(map(_written, node.nodes))})"


def times(node: Repeat) -> str:
    """``*``, ``+``, ``?``, ``{3}``, ``{3,}`` or ``{3,5}``."""
    counts = (node.least, node.most)
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(counts)
    if short is not None:
        return short
    if node.least == node.most:
        return f"{{{node.least}}}"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and (char.isalnum() or char in " _.,;:!?(){}<>=+*/%&$#@~|'"):
        return char
    # Not \\xHH: some readers take every hexadecimal digit after it.
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _check_ends(rules: Rules, param: str) -> None:
    """Each rule has a text that ends, and none asks for more of it at once than may be."""
    shortest = _shortest(rules)
    endless = [name for name in rules if name not in shortest]
    if endless:
        circle = _circle(rules, START if START in endless else endless[0], set(endless))
        raise InvalidRequest(
            f"{param}: no text ever ends with {circle}: it leads back to itself whatever is chosen",
            param=param,
            code="grammar_without_end",
        )
    for name, node in rules.items():
        if max(_asked(node, shortest)) > MAX_FORCED:
            text = f"{param}: the repetitions of the rule {name!r} ask for more than {MAX_FORCED} characters at once"
            raise InvalidRequest(text, param=param, code="grammar_too_large")


def _shortest(rules: Rules) -> dict[str, int]:
    """Length of the shortest text of each rule that has one that ends."""
    found: dict[str, int] = {}
    more = True
    while more:
        more = False
        for name, node in rules.items():
            length = _least(node, found)
            if length is not None and length < found.get(name, length + 1):
                found[name] = length
                more = True
    return found


def _least(node: Node, shortest: Mapping[str, int]) -> int | None:
    """Length of a node's shortest text; None where it has none, as far as is known."""
    if isinstance(node, Literal):
        return len(node.text)
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Ref):
        return shortest.get(node.name)
    if isinstance(node, Repeat):
        inner = _least(node.node, shortest) if node.least else 0
        return None if inner is None else inner * node.least
    lengths = [_least(one, shortest) for one in node.nodes]
    if isinstance(node, Choice):
        return min((one for one in lengths if one is not None), default=None)
    return None if None in lengths else sum(filter(None, lengths))


def _asked(node: Node, shortest: Mapping[str, int]) -> Iterator[int]:
    """Yield what each part asks for at least, once it has been begun."""
    if isinstance(node, Repeat):
        yield max(1, node.least) * (_least(node.node, shortest) or 0)
        yield from _asked(node.node, shortest)
    elif isinstance(node, (Sequence, Choice)):
        yield _least(node, shortest) or 0
        for one in node.nodes:
            yield from _asked(one, shortest)
    else:
        yield _least(node, shortest) or 0


def _circle(rules: Rules, start: str, endless: set[str]) -> str:
    """Find a way that comes back, through rules without end only."""
    path = [start]
    while True:
        name = next(other for other in references(rules[path[-1]]) if other in endless)
        if name in path:
            return " > ".join([*path[path.index(name) :], name])
        path.append(name)


class _Parser:
    """Recursive descent over the text; `_at` is the place."""

    def __init__(self, text: str, param: str) -> None:
        self._text = text
        self._param = param
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                raise self._error("a rule is expected here: name ::= ...")
            name = head.group()[:-3].rstrip()
            if name in rules:
                raise self._error(f"the rule {name!r} is defined twice")
            self._at = head.end()
            self._skip()
            rules[name] = self._choice()
        return rules

    def _choice(self) -> Node:
        nodes = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            self._skip()
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        while self._peek() not in ("", "|", ")") and _HEAD.match(self._text, self._at) is None:
            nodes.append(self._repeated(self._item()))
            self._skip()
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _repeated(self, node: Node) -> Node:
        self._skip()
        while (mark := self._peek()) and mark in "*+?{":
            if mark == "{":
                count = _COUNT.match(self._text, self._at)
                if count is None:
                    raise self._error("a repetition is expected here: {2}, {2,} or {2,5}")
                least = int(count[1])
                most = least if count[2] is None else None if count[3] is None else int(count[3])
                if most is not None and most < least:
                    raise self._error(f"a repetition of at least {least} and at most {most}")
                if max(least, most or 0) > MAX_REPEAT:
                    raise self._error(f"more than {MAX_REPEAT} repetitions")
                self._at = count.end()
            else:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
                self._at += 1
            node = Repeat(node, least, most)
            self._skip()
        return node

    def _item(self) -> Node:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._chars()
        if char == "(":
            return self._group()
        if char == ".":
            self._at += 1
            return ANY
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error(f"{char!r} is not expected here")
        self._at = name.end()
        return Ref(name.group())

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {MAX_DEPTH}")
        self._at += 1
        self._skip()
        node = self._choice()
        if self._peek() != ")":
            raise self._error("')' is missing")
        self._at += 1
        self._depth -= 1
        return node

    def _literal(self) -> Node:
        self._at += 1
        chars: list[str] = []
        while (char := self._peek()) != '"':
            if char in ("", "\n"):
                raise self._error("this text has no end: '\"' is missing")
            chars.append(self._one())
        self._at += 1
        return Literal("".join(chars))

    def _chars(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        spans: list[Span] = []
        while (char := self._peek()) != "]":
            if char in ("", "\n"):
                raise self._error("this class of characters has no end: ']' is missing")
            first = last = ord(self._one())
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = ord(self._one())
                if last < first:
                    raise self._error("a range whose end comes before its beginning")
            spans.append((first, last))
        if not spans:
            raise self._error("an empty class of characters")
        self._at += 1
        return Chars(tuple(spans), negated)

    def _one(self) -> str:
        """Read one character, escaped or not."""
        char = self._peek()
        self._at += 1
        if char != "\\":
            return char
        escape = self._peek()
        if escape in _ESCAPES:
            self._at += 1
            return _ESCAPES[escape]
        code = _HEX.match(self._text, self._at)
        value = -1 if code is None else int(next(filter(None, code.groups())), 16)
        if code is None or value > MAX_CHAR or 0xD800 <= value <= 0xDFFF:
            raise self._error(f"\\{escape} is not an escape, or not a character")
        self._at = code.end()
        return chr(value)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        if blank is not None:
            self._at = blank.end()

    def _error(self, what: str) -> InvalidRequest:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return InvalidRequest(f"{self._param}: line {line}, column {column}: {what}", param=self._param)
