"""Chat templates: jinja2 in its immutable sandbox, with the helpers that templates on the hub expect.

Renders what transformers' ``apply_chat_template(tokenize=False)`` renders, without importing transformers. A template
is code that came with a model: it runs sandboxed, sees plain JSON values only, and its output is bounded.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pegboard.core.interfaces.errors import InvalidRequest

MAX_RENDERED_CHARS = 16_000_000
"""A rendered conversation longer than this is refused: no model here reads that much, a runaway loop writes more."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Template variables that come from the request's own fields, so that template kwargs may not set them."""


class ChatTemplateError(InvalidRequest):
    """A conversation that cannot be rendered: no template, a template that refuses it, or values of the wrong shape."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages", code="chat_template")

    def __reduce__(self) -> tuple[object, tuple[str]]:  # type: ignore[override]
        return ChatTemplateError, (self.message,)


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _plain(value: object) -> object:
    """`value` rebuilt from plain JSON types, so that a template never holds an object with methods worth calling."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


class ChatTemplate:
    """One compiled template. Thread-safe; compile once and keep.

    `variables` are the names that the template reads and does not define itself: the kwargs that have an effect.
    Raises ChatTemplateError where `source` is not valid jinja2.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is not valid jinja2: line {error.lineno}: {error}") from error
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree)) - environment.globals.keys()

    def reads(self, name: str) -> bool:
        """Return whether a variable of this name has an effect."""
        return name in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the conversation as prompt text.

        `variables` reach the template beside the special tokens that the caller puts there; reserved names in it are
        refused. `continue_final_message` ends the text with the last message's content instead of closing the turn.
        Raises ChatTemplateError for whatever the template or a value's shape makes impossible.
        """
        chat = [_plain(one) for one in messages]
        mark = final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
            mark = f"\ue0c1{secrets.token_hex(8)}\ue0c2"
            final = _mark_final_message(chat, mark)
        context = {str.__str__(name): _plain(value) for name, value in (variables or {}).items()}
        if clash := RESERVED & context.keys():
            raise ChatTemplateError(f"chat template kwargs may not set {', '.join(sorted(clash))}")
        text = self._run(
            messages=chat,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **context,
        )
        return _cut_at_mark(text, mark, final) if mark else text

    def _run(self, **context: object) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**context):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the rendered conversation exceeds {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error.message or error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot render the messages: {error}") from error
        return "".join(pieces)


def _mark_final_message(chat: list[object], mark: str) -> str:
    """Put `mark` after the last message's text, which is returned."""
    if not chat or not isinstance(chat[-1], dict):
        raise ChatTemplateError("continue_final_message needs a message to continue")
    message = chat[-1]
    content = message.get("content")
    if isinstance(content, str):
        # With a space after it: one that is gone afterwards tells that the template trims.
        message["content"] = content + mark + " "
        return content
    parts = content if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            found: str = part["text"]
            part["text"] = found + mark + " "
            return found
    raise ChatTemplateError("continue_final_message needs a last message with text content")


def _cut_at_mark(text: str, mark: str, final: str) -> str:
    """Return the text before the mark, without white space at its end where the template trims; as transformers does
    it.
    """
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        # Some templates leave earlier thoughts out, for example.
        raise ChatTemplateError("continue_final_message: the template does not render the last message's text as it is")
    return text[:at] if text.startswith(" ", at + len(mark)) else text[:at].rstrip()


def select_source(sources: Mapping[str, str], *, name: str | None = None, with_tools: bool = False) -> str:
    """Return the source called `name`; without one "tool_use" where tools are given and it exists, else "default".

    Raises ChatTemplateError where there is none, naming those that exist.
    """
    if name is None:
        name = "tool_use" if with_tools and "tool_use" in sources else "default"
    if name in sources:
        return sources[name]
    if not sources:
        raise ChatTemplateError(
            "this model has no chat template, so it cannot take chat messages; send a plain prompt to a completions "
            "route instead"
        )
    raise ChatTemplateError(f"no chat template named {name[:64]!r}; this model has: {', '.join(sources)}")


class ChatTemplates:
    """The templates of one model by name; the usual one is called "default", one for tool calls "tool_use".

    Templates are compiled on first use: most models carry one, and a broken one that is not asked for does no harm.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._compiled: dict[str, ChatTemplate] = {}

    @property
    def sources(self) -> Mapping[str, str]:
        """The sources by name, "default" first."""
        return {name: self._sources[name] for name in self.names}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all templates, "default" first."""
        return tuple(sorted(self._sources, key=lambda name: (name != "default", name)))

    def select(self, *, name: str | None = None, with_tools: bool = False) -> ChatTemplate:
        """Return the template that `select_source` chooses, compiled."""
        source = select_source(self.sources, name=name, with_tools=with_tools)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]
