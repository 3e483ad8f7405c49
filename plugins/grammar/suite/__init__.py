"""The conformance suite of GrammarBackend."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarBackend, GrammarContext
from pegboard.plugins.grammar.suite.cases import (
    ALL,
    EBNF,
    EOS,
    INVALID,
    KINDS,
    LARGE,
    LETTER,
    OBJECTS,
    PERSON,
    REGEXES,
    SCHEMAS,
    SPECIAL,
    TAGS,
    UNIONS,
    WIDTH,
    Case,
    schema,
)
from pegboard.plugins.grammar.suite.walks import (
    GARBAGE,
    bits,
    bytes_of,
    random_walk,
    row_of,
    spelled_otherwise,
    spelling,
    walked,
)
from pegboard.toolkit.grammars.grammar import any_of, parts_of
from pegboard.toolkit.text.tokenizer import Tokenizer


class GrammarContract(ContractSuite):
    """A backend takes what a grammar allows and nothing else, and says so before and after.

    Kinds of grammars are capabilities, and so are rollback and forced tokens. The tokenizer has every byte as a token
    of its own, some longer ones, and special ones.
    """

    contract = "grammar"

    @pytest.fixture
    def ctx(self, tmp_path: Path) -> GrammarContext:
        write_tiny_tokenizer(tmp_path)
        return GrammarContext(tmp_path, Tokenizer.from_directory(tmp_path), WIDTH, frozenset({EOS}))

    @pytest.fixture
    def backend(self, ctx: GrammarContext) -> GrammarBackend:
        made: GrammarBackend = self.build(ctx)
        return made

    # What the tests share.

    def compiled(self, backend: GrammarBackend, grammar: Grammar) -> CompiledGrammar:
        data = backend.compile(grammar)
        assert isinstance(data, bytes), "it travels between processes"
        return backend.load(grammar, data)

    def cases(self) -> Iterator[Case]:
        for kind in KINDS:
            if kind in self.capabilities:
                yield from ALL[kind]

    def skip_without(self, kinds: set[str]) -> None:
        if lacking := sorted(kinds - self.capabilities):
            pytest.skip(f"it does not declare {', '.join(lacking)}")

    def check(self, backend: GrammarBackend, case: Case) -> None:
        compiled = self.compiled(backend, case.grammar)
        for text in case.good:
            assert self.spelled(compiled, text) is not None, f"{case}: {text!r} follows it, but no tokens spell it"
        for text in case.bad:
            assert self.spelled(compiled, text) is None, f"{case}: {text!r} does not follow it, but is taken"

    def spelled(self, compiled: CompiledGrammar, text: str) -> list[int] | None:
        """Return tokens that spell a text, each in the mask after those before it, and the end after them all. None
        where there are none, however the text is cut.
        """
        return spelling(compiled, text.encode(), [])

    def path(self, compiled: CompiledGrammar, case: Case, text: str) -> list[int]:
        """Return tokens that spell a good text."""
        found = self.spelled(compiled, text)
        assert found is not None, f"{case}: {text!r} follows it, but no tokens spell it"
        return found

    # The tests.

    @capability("json_schema")
    @pytest.mark.parametrize("case", SCHEMAS, ids=str)
    def test_json_schema(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("json_schema")
    @pytest.mark.parametrize("case", LARGE, ids=str)
    def test_large_integers_are_exact_or_refused(self, backend: GrammarBackend, case: Case) -> None:
        self.skip_without({case.grammar.kind})
        try:
            backend.compile(case.grammar)
        except InvalidRequest as error:
            named = error.param
        else:
            self.check(backend, case)
            return
        assert named == case.grammar.kind, f"{case}: the refusal names {named!r}"

    @capability("json_object")
    @pytest.mark.parametrize("case", OBJECTS, ids=str)
    def test_json_object(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("regex")
    @pytest.mark.parametrize("case", REGEXES, ids=str)
    def test_regex(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("ebnf")
    @pytest.mark.parametrize("case", EBNF, ids=str)
    def test_ebnf(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("any_of")
    @pytest.mark.parametrize("case", UNIONS, ids=str)
    def test_any_of(self, backend: GrammarBackend, case: Case) -> None:
        self.skip_without({one.kind for one in parts_of(case.grammar)})
        self.check(backend, case)

    @capability("any_of")
    def test_what_is_wrong_with_a_part_is_said_of_that_part(self, backend: GrammarBackend) -> None:
        self.skip_without({"json_object", "json_schema"})
        for source in INVALID["json_schema"]:
            with pytest.raises(InvalidRequest) as error:
                self.compiled(backend, any_of(Grammar("json_object"), schema(source)))
            assert str(error.value.param).partition(".")[0] == "json_schema", source[:100]

    @capability("structural_tag")
    @pytest.mark.parametrize("case", TAGS, ids=str)
    def test_structural_tag(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    def test_what_is_no_grammar_is_refused_by_its_name(self, backend: GrammarBackend) -> None:
        for kind in KINDS:
            for source in INVALID.get(kind, ()):
                with pytest.raises(InvalidRequest) as error:
                    self.compiled(backend, Grammar(kind, source))
                assert error.value.status == 400, source[:100]
                assert str(error.value.param).partition(".")[0] == kind, source[:100]
                assert len(error.value.message) < 2000, "an error is for people"

    def test_a_kind_that_is_not_declared_is_refused(self, backend: GrammarBackend) -> None:
        for kind in KINDS:
            if kind not in self.capabilities:
                with pytest.raises(InvalidRequest):
                    backend.compile(ALL[kind][0].grammar)

    def test_fill_and_accept_agree(self, backend: GrammarBackend) -> None:
        """At the beginning, and after each fourth token of a text: each token that is named is accepted, the end is
        where it may be, and no other is accepted but tokens whose text others spell.
        """
        tokenizer = backend.ctx.tokenizer
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good[-1:]:
                path = self.path(compiled, case, text)
                for at in sorted({0, *range(1, len(path), 4), len(path)}):
                    allowed = bits(compiled, path[:at])
                    where = f"{case} after {path[:at]} on the way to {text!r}"
                    asked = {*np.flatnonzero(allowed)[:24].tolist(), *range(at % 5, WIDTH, 5), EOS, *SPECIAL, WIDTH - 1}
                    for token in sorted(asked):
                        accepted = walked(compiled, path[:at]).accept(token)
                        if allowed[token]:
                            assert accepted, f"{where}: token {token} is in the mask, but not accepted"
                        elif not spelled_otherwise(token, allowed):
                            assert not accepted, f"{where}: token {token} is accepted, but not in the mask"
                    assert not allowed[[*SPECIAL, *range(tokenizer.vocab_size, WIDTH)]].any(), where

    def test_a_row_is_filled_whole_and_no_other_is_touched(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            mask = np.full((3, WIDTH // 32), GARBAGE, np.int32)
            clean = np.zeros((1, WIDTH // 32), np.int32)
            filled = compiled.matcher().fill(mask, 1)
            assert compiled.matcher().fill(clean, 0) == filled
            if filled:
                assert (mask[1] == clean[0]).all(), f"{case}: it depends on what was in the mask"
            assert (mask[[0, 2]] == GARBAGE).all(), f"{case}: another row has changed"

    def test_filling_changes_nothing(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good[-1:]:
                matcher = compiled.matcher()
                for token in self.path(compiled, case, text):
                    first, second = row_of(matcher), row_of(matcher)
                    assert (first == second).all()
                    assert matcher.accept(token), f"{case}: {text!r}"

    def test_a_refused_token_changes_nothing(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good[-1:]:
                matcher = compiled.matcher()
                for token in self.path(compiled, case, text):
                    before = row_of(matcher)
                    for wrong in {*np.flatnonzero(~before)[::37].tolist(), *SPECIAL, WIDTH - 1}:
                        if not spelled_otherwise(wrong, before):
                            assert not matcher.accept(wrong), f"{case}: {wrong} is accepted, but not in the mask"
                    assert (row_of(matcher) == before).all(), f"{case}: a refused token has left something behind"
                    assert matcher.accept(token), f"{case}: {text!r}"

    def test_an_output_that_is_complete_is_terminated(self, backend: GrammarBackend) -> None:
        """Where nothing can follow but the end, and not before."""
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good:
                matcher = compiled.matcher()
                for token in self.path(compiled, case, text):
                    assert not matcher.terminated, f"{case}: {text!r} is not complete yet"
                    assert matcher.accept(token)
                allowed = np.flatnonzero(row_of(matcher)).tolist()
                assert EOS in allowed, f"{case}: {text!r} may end here"
                assert matcher.terminated == (allowed == [EOS]), f"{case}: after {text!r} come {allowed[:9]}"
                assert matcher.accept(EOS)
                assert matcher.terminated, f"{case}: it has ended"
                assert not row_of(matcher).any(), f"{case}: something comes after the end"
                assert not matcher.accept(EOS)
                assert not matcher.accept(LETTER)

    @capability("rollback")
    def test_rollback(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good:
                tokens = [*self.path(compiled, case, text), EOS]
                matcher = compiled.matcher()
                rows = []
                for token in tokens:
                    rows.append(row_of(matcher))
                    assert matcher.accept(token)
                matcher.rollback(0)
                assert matcher.terminated
                at = len(tokens)
                for count in (1, 2, 1, len(tokens)):
                    back = min(count, at)
                    matcher.rollback(back)
                    at -= back
                    assert (row_of(matcher) == rows[at]).all(), f"{case}: {text!r}, {back} back to {at}"
                for token in tokens[at:]:
                    assert matcher.accept(token), f"{case}: forward again, {text!r}"
                assert matcher.terminated

    @capability("jump_ahead")
    def test_forced_tokens_are_the_only_way_on(self, backend: GrammarBackend) -> None:
        """All of them are accepted, one after the other; every text that may still come begins with theirs."""
        found = 0
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good:
                matcher = compiled.matcher()
                path = self.path(compiled, case, text)
                for at, token in enumerate(path):
                    before = row_of(matcher)
                    forced = list(matcher.forced())
                    assert (row_of(matcher) == before).all(), f"{case}: asking for forced tokens has changed something"
                    self._check_forced(compiled, path[:at], forced, case)
                    found += len(forced)
                    assert matcher.accept(token)
        if any(kind in self.capabilities for kind in ("regex", "ebnf", "json_schema")):
            assert found, "it declares jump_ahead, but has never named a token"

    def _check_forced(self, compiled: CompiledGrammar, path: list[int], forced: list[int], case: Case) -> None:
        matcher = walked(compiled, path)
        rest = b"".join(map(bytes_of, forced))
        for token in forced:
            for other in np.flatnonzero(row_of(matcher)).tolist():
                spelled = b"" if other == EOS else bytes_of(other)
                same = spelled and (rest.startswith(spelled) or spelled.startswith(rest))
                assert same, f"{case}: {rest!r} is said to be forced after {path}, but {spelled!r} may come as well"
            assert matcher.accept(token), f"{case}: {token} is said to be forced after {path}"
            rest = rest[len(bytes_of(token)) :]

    def test_matchers_of_one_grammar_are_independent(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            texts = [self.path(compiled, case, text) for text in case.good for _ in range(2)]
            matchers = [compiled.matcher() for _ in texts]
            fresh = row_of(compiled.matcher())
            for step in range(max(map(len, texts), default=0)):
                for matcher, tokens in zip(matchers, texts, strict=True):
                    if step < len(tokens):
                        assert matcher.accept(tokens[step]), f"{case}: one output disturbs another"
            assert (row_of(compiled.matcher()) == fresh).all(), f"{case}: a new matcher is not at the beginning"

    def test_matchers_work_in_several_threads(self, backend: GrammarBackend) -> None:
        cases = list(self.cases())
        compiled = [self.compiled(backend, case.grammar) for case in cases]

        paths = [
            self.path(one, case, case.good[0]) if case.good else [] for one, case in zip(compiled, cases, strict=True)
        ]

        def run(index: int) -> list[bytes]:
            matcher, rows = compiled[index].matcher(), []
            for token in paths[index]:
                rows.append(row_of(matcher).tobytes())
                matcher.accept(token)
            return rows

        alone = [run(index) for index in range(len(cases))]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(3):
                assert list(threads.map(run, range(len(cases)))) == alone

    def test_what_one_instance_compiles_another_loads(self, backend: GrammarBackend, ctx: GrammarContext) -> None:
        other: GrammarBackend = self.build(ctx)
        for case in self.cases():
            compiled = other.load(case.grammar, bytes(bytearray(backend.compile(case.grammar))))
            for text in case.good:
                self.path(compiled, case, text)

    def test_its_size_is_known(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            assert self.compiled(backend, case.grammar).size_bytes > 0

    def test_whoever_stays_within_the_mask_gets_on(self, backend: GrammarBackend) -> None:
        """Random walks through the masks never get stuck."""
        for number, case in enumerate(self.cases()):
            compiled = self.compiled(backend, case.grammar)
            for seed in range(3):
                random_walk(compiled, random.Random(1000 * number + seed))

    @capability("json_schema")
    def test_a_random_answer_is_json(self, backend: GrammarBackend) -> None:
        person = self.compiled(backend, schema(PERSON))
        ended = 0
        for seed in range(12):
            tokens, done = random_walk(person, random.Random(seed))
            if done:
                ended += 1
                spelled = b"".join(map(bytes_of, tokens))
                value = json.loads(spelled)
                assert list(value) == ["name", "age"], spelled
                assert isinstance(value["name"], str), spelled
                assert isinstance(value["age"], int), spelled
        assert ended > 3, "random answers hardly ever end"
