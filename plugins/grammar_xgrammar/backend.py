"""GrammarBackend on xgrammar."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xgrammar

from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.core.interfaces.sampling import Grammar, GrammarKind
from pegboard.plugins.grammar.api import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    TokenizerViews,
    refused,
)
from pegboard.plugins.grammar_xgrammar.options import XGrammarOptions
from pegboard.plugins.grammar_xgrammar.patterns import dots_within_lines, pattern_problem
from pegboard.plugins.grammar_xgrammar.schema import NotEnforced, enforceable
from pegboard.toolkit.grammars import gbnf
from pegboard.toolkit.grammars.grammar import StructuralTag, parts_of, structural_tag_of
from pegboard.toolkit.grammars.json_schema import checked_schema, schema_of
from pegboard.toolkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SOURCE_LINE = re.compile(r"^\[\d\d:\d\d:\d\d\] [^:]*:\d+: ")


class XGrammarBackend(GrammarBackend[XGrammarOptions]):
    """Compiled grammars carry precomputed masks; they travel as the library's own JSON."""

    def __init__(self, options: XGrammarOptions, ctx: GrammarContext) -> None:
        super().__init__(options, ctx)
        self._info, self._tokenizer = _TOKENIZERS.of(ctx)
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    @classmethod
    def supports(cls, options: XGrammarOptions, ctx: GrammarContext) -> str | None:
        return _TOKENIZERS.problem(ctx)

    def compile(self, grammar: Grammar) -> bytes:
        parts = []
        for one in parts_of(grammar):
            with _refusing(one.kind):
                parts.append(self._read(one))
        with _refusing(grammar.kind):
            compiled = self._compiler.compile_grammar(parts[0] if len(parts) == 1 else xgrammar.Grammar.union(*parts))
        return str(compiled.serialize_json()).encode()

    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        return _Compiled(
            xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._info),
            self._words,
            self._encode,
            self.ctx.eos_token_ids,
        )

    @property
    def _words(self) -> int:
        return -(-self.ctx.vocab_size // 32)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _read(self, grammar: Grammar) -> xgrammar.Grammar:
        """Return the library's grammar."""
        if grammar.kind == "json_object":
            return self._json_schema({"type": "object"})
        if grammar.kind == "json_schema":
            return self._json_schema(schema_of(grammar.source))
        if grammar.kind == "ebnf":
            text = gbnf.to_gbnf(gbnf.parse(grammar.source))
            return xgrammar.Grammar.from_ebnf(text, root_rule_name=gbnf.START)
        if grammar.kind == "regex":
            if why := pattern_problem(grammar.source):
                raise NotEnforced(f"{why} is not understood")
            return xgrammar.Grammar.from_regex(dots_within_lines(grammar.source))
        return xgrammar.Grammar.from_structural_tag(
            json.dumps(self._structural(structural_tag_of(json.loads(grammar.source))))
        )

    def _json_schema(self, schema: JsonValue) -> xgrammar.Grammar:
        return xgrammar.Grammar.from_json_schema(
            json.dumps(self._enforceable(schema)),
            strict_mode=False,
            max_whitespace_cnt=self.options.max_whitespace,
        )

    def _enforceable(self, schema: JsonValue) -> JsonValue:
        made = enforceable(schema, lenient=self.options.lenient_schemas)
        return {} if made is True else made

    def _structural(self, tag: StructuralTag) -> dict[str, JsonValue]:
        tags: list[JsonObject] = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {
                    "type": "json_schema",
                    "json_schema": self._enforceable(checked_schema(one["schema"], "structural_tag")),
                },
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
        flags = {
            "at_least_one": tag.get("at_least_one", False),
            "stop_after_first": tag.get("stop_after_first", False),
        }
        if "separator" not in tag:
            form: JsonObject = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags, **flags}
            return {"type": "structural_tag", "format": form}
        between = tag["separator"]
        alone: JsonObject = {"type": "tags_with_separator", "separator": between, "tags": tags, **flags}
        if tag.get("trailing_separator") and between and not flags["stop_after_first"]:
            more: JsonObject = {"type": "optional", "content": {"type": "const_string", "value": between}}
            alone = {"type": "sequence", "elements": [{**alone, "at_least_one": True}, more]}
            if not flags["at_least_one"]:
                alone = {"type": "optional", "content": alone}
        parts = [*_constant(tag.get("begin", "")), alone, *_constant(tag.get("end", ""))]
        return {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}


def _constant(text: str) -> list[JsonObject]:
    return [{"type": "const_string", "value": text}] if text else []


def _tokenizer_info(directory: Path, vocab_size: int, eos: tuple[int, ...]) -> tuple[xgrammar.TokenizerInfo, Tokenizer]:
    """xgrammar's view of the model's tokenizer, and the tokenizer.

    Special tokens have no text here, or a JSON string could hold one that ends the answer for its reader.
    """
    tokenizer = Tokenizer.from_directory(directory)
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_json())
    words = [
        "" if token in tokenizer.special_ids else tokenizer.id_to_token(token) or ""
        for token in range(tokenizer.vocab_size)
    ]
    info = xgrammar.TokenizerInfo(
        words,
        metadata["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=list(eos),
        add_prefix_space=metadata["add_prefix_space"],
    )
    return info, tokenizer


_TOKENIZERS = TokenizerViews("xgrammar", _tokenizer_info)


class _Compiled(CompiledGrammar):
    def __init__(
        self, compiled: xgrammar.CompiledGrammar, words: int, encode: Callable[[str], list[int]], ends: frozenset[int]
    ) -> None:
        self._compiled = compiled
        self._words = words
        self._encode = encode
        self._ends = np.zeros((1, words), np.uint32)
        for token in ends:
            self._ends[0, token // 32] |= np.uint32(1 << token % 32)

    @property
    def size_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> GrammarMatcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._words, self._encode, self._ends.view(np.int32))


class _Matcher(GrammarMatcher):
    def __init__(
        self, matcher: xgrammar.GrammarMatcher, words: int, encode: Callable[[str], list[int]], ends: NDArray[np.int32]
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._encode = encode
        self._ends = ends

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        if self._matcher.is_terminated():
            mask[row] = 0
            return True
        return bool(self._matcher.fill_next_token_bitmask(mask, row))

    def accept(self, token: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    @property
    def terminated(self) -> bool:
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        # Complete, but perhaps not at its end: more may follow in `[0-9]+`.
        mask = np.empty((1, self._words), np.int32)
        return bool(self._matcher.fill_next_token_bitmask(mask, 0)) and not (mask & ~self._ends).any()

    def forced(self) -> Sequence[int]:
        if self._matcher.is_terminated():
            return ()
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:
            return ()  # within a character
        if not text:
            return ()
        # The last token might be another one together with what follows.
        tokens = self._encode(text)[:-1]
        taken = 0
        while taken < len(tokens) and self._matcher.accept_token(tokens[taken]):
            taken += 1
        self._matcher.rollback(taken)
        return tokens[:taken]


@contextlib.contextmanager
def _refusing(kind: GrammarKind) -> Iterator[None]:
    """Errors of the library, as those of a grammar of this kind."""
    try:
        yield
    except NotEnforced as error:
        raise refused(kind, f"{error} by this server's grammar backend (xgrammar)") from None
    except (ValueError, RuntimeError, RecursionError) as error:
        raise refused(kind, _explained(error)) from None


def _explained(error: Exception) -> str:
    """Return the library's message without the line of its source."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return _SOURCE_LINE.sub("", lines[-1]) if lines else type(error).__name__
