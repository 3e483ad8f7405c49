"""What a speculator owes that drafts on the device: the part of the suite about the capability `device`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.plugins.speculation.api import DeviceSpeculator, DraftRow
from pegboard.plugins.speculation.suite.bench import Bench, Part, Request
from pegboard.plugins.speculation.suite.checks import (
    MOST,
    VOCAB,
    Int64s,
    PlainTree,
    check,
    check_trees,
    count_steps,
    plain,
)
from pegboard.plugins.speculation.suite.device_rig import DeviceRig
from pegboard.plugins.speculation.suite.model import LAYERS, toy_context

ROWS = 6

SHORT, LONG = 128, 1024
"""Lengths of texts, over which the work of a call must not grow."""
_CALLS = 9


class DeviceTests(ContractSuite):
    """Whatever way a text was computed, its drafts are those of one that was computed at once, and then token by token.
    The model is a stand-in whose states depend on the tokens alone.
    """

    def texts(self) -> Sequence[tuple[Sequence[int], int]]:
        """Return texts below `VOCAB`, each with how many tokens of it are the prompt; the longest prompt has 12 tokens
        or more, and 10 follow it.
        """
        return self.short_texts()

    def short_texts(self) -> list[tuple[list[int], int]]:
        rng = np.random.default_rng(5)
        sizes = ((14, 14), (5, 9), (1, 8), (8, 4))
        return [(rng.integers(0, VOCAB, prompt + output).tolist(), prompt) for prompt, output in sizes]

    # ---- what the tests share -------------------------------------------------------------------------------------

    def made(self, max_nodes: int = MOST, rows: int = ROWS) -> DeviceSpeculator:
        """Return a new speculator for the suite's model."""
        found: DeviceSpeculator = self.build(toy_context(max_nodes, rows))
        assert isinstance(found, DeviceSpeculator), "it declares `device`, but does not derive from DeviceSpeculator"
        return found

    def bench(
        self,
        max_nodes: int = MOST,
        *,
        length: int = 0,
        rows: int = 0,
        poison: float | None = None,
        strict: bool = False,
        clobber: bool = False,
    ) -> Bench:
        """Return a new speculator, loaded, for the texts of these tests, or for longer ones."""
        texts = self.texts()
        rows = rows or max(ROWS, len(texts))
        longest = max(length, *(len(text) for text, _ in texts))
        made = self.made(max_nodes, rows)
        return Bench(
            made,
            rows=rows,
            length=longest,
            branches="branches" in self.capabilities,
            poison=poison,
            strict=strict,
            clobber=clobber,
        )

    def rig(self, max_nodes: int = MOST) -> DeviceRig:
        """Return a new speculator as one that proposes."""
        return DeviceRig(self.bench(max_nodes))

    def text(self, shift: int = 0) -> tuple[Int64s, int]:
        """Return a text and the length of its prompt, less so many tokens at its front."""
        text, prompt = max(self.texts(), key=lambda one: one[1])
        return np.array(text[shift:], np.int64), prompt - shift

    def grown(self, bench: Bench, request: Request, until: int) -> dict[int, PlainTree]:
        """Compute a text token by token; return its trees, by how many tokens are computed."""
        found = {}
        while True:
            found[request.computed] = self.trees(bench, [request])[0]
            if request.computed == until:
                return found
            bench.run([Part(request, request.computed + 1)])

    def expected(self, text: Int64s, prompt: int) -> dict[int, PlainTree]:
        """Return the trees of a text of which nothing else is known: the prompt is computed at once."""
        bench = self.bench()
        request = bench.admit(text)
        bench.run([Part(request, prompt)])
        found = self.grown(bench, request, len(text) - 1)
        if all(len(tokens) == 1 for tokens, _ in found.values()):
            pytest.skip("nothing is drafted for these texts: override texts")
        return found

    def trees(self, bench: Bench, requests: Sequence[Request]) -> list[PlainTree]:
        """Return what is drafted for requests."""
        most = [MOST] * len(requests)
        found = bench.draft(requests, most)
        check_trees(found, [int(request.text[request.computed]) for request in requests], most)
        return plain(found)

    def check_grown(self, bench: Bench, request: Request, expected: Mapping[int, PlainTree], why: str) -> None:
        """Fail where the trees of a request, now and later, are not those of its text."""
        __tracebackhide__ = True
        for computed, found in self.grown(bench, request, len(request.text) - 1).items():
            assert found == expected[computed], f"behind {computed} tokens: {why}"

    def busy(self, bench: Bench) -> list[tuple[Request, int, PlainTree]]:
        """Run passes in which requests of all kinds meet: chunks that sample nothing, cached prefixes, drafts that
        stand and drafts that do not, decodes with room and without. Return (request, tokens computed, tree) of all
        drafts.
        """
        (text, prompt), half = self.text(), self.text()[1] // 2
        whole, second, third, chunked = (bench.admit(self.text(shift)[0]) for shift in range(4))
        bench.run([Part(second, prompt - 1), Part(whole, prompt), Part(third, prompt - 1, room=False)])
        found = self.noted(bench, [whole, third])
        other = bench.admit(np.concatenate([text[:half], (text[half:] + 1) % VOCAB]), prefix=(whole, half))
        bench.run(
            [
                Part(chunked, half, sampled=False),
                Part(third, prompt, room=False),
                Part(second, second.computed + 3, tree=True),
                Part(other, prompt),
                Part(whole, prompt + 1),
            ]
        )
        found += self.noted(bench, [whole, third, other, second])
        bench.run(
            [
                Part(chunked, prompt - 3, room=False),
                Part(third, third.computed + 2, tree=True),
                Part(whole, whole.computed + 1, tree=True),
                Part(other, other.computed + 4, tree=True),
            ]
        )
        found += self.noted(bench, [other, second, chunked, third, whole])
        bench.run([Part(one, one.computed + 1) for one in (third, whole, other, chunked, second)])
        return found + self.noted(bench, [second, third, whole, chunked, other])

    def noted(self, bench: Bench, requests: Sequence[Request]) -> list[tuple[Request, int, PlainTree]]:
        trees = self.trees(bench, requests)
        return [(request, request.computed, found) for request, found in zip(requests, trees, strict=True)]

    # ---- facts ----------------------------------------------------------------------------------------------------

    @lacks("device")
    def test_it_does_not_draft_on_the_device(self) -> None:
        """What it is decides whether `propose` or `draft` is asked."""
        assert not issubclass(self.provider_class(), DeviceSpeculator), "it lacks the capability `device`"

    @capability("device")
    def test_facts_of_drafting_on_the_device(self) -> None:
        speculator = self.made()
        before = _facts(speculator)
        ids = [layer.layer_id for layer in speculator.layers]
        assert all(one >= LAYERS for one in ids), f"layers {ids}, where those below {LAYERS} are the model's"
        assert len(set(ids)) == len(ids), f"layers {ids}: each has an id of its own"
        assert all(layer.kv_group == 0 for layer in speculator.layers), "a layer outside the first KV group"
        places = range(LAYERS + 2)
        assert all(place in places for place in speculator.taps), f"taps {speculator.taps}, not all in {places}"
        assert speculator.reserve >= 0, f"reserve is {speculator.reserve}"
        assert speculator.lookback in (0, 1), f"lookback is {speculator.lookback}"
        bench = self.bench()
        self.busy(bench)
        assert _facts(bench.speculator) == before, "facts have changed since it was built"

    # ---- memory ---------------------------------------------------------------------------------------------------

    @capability("device")
    def test_it_writes_into_slots_of_its_own(self) -> None:
        """Of its own layers, and of the requests at hand: not of cached prefixes, nor of what comes later."""
        self.busy(self.bench(strict=True, poison=7.0))

    @capability("device")
    @pytest.mark.parametrize("poison", [math.nan, 7.0])
    def test_free_slots_are_not_read(self, poison: float) -> None:
        """What is in them is another request's, or nothing at all. That goes for what was drafted before, too."""
        found, expected = (self.busy(self.bench(poison=one)) for one in (poison, None))
        assert _trees(found) == _trees(expected), _FREE

    @capability("device")
    def test_nothing_given_is_kept(self) -> None:
        """Memory that ids and states were in is something else's after the call."""
        found, expected = (self.busy(self.bench(clobber=one)) for one in (True, False))
        assert _trees(found) == _trees(expected), "it keeps a view of what it was given: copy what is needed"

    # ---- what a tree depends on -----------------------------------------------------------------------------------

    @capability("device")
    def test_kinds_of_requests_in_one_pass(self) -> None:
        found = self.busy(self.bench())
        expected: dict[int, Mapping[int, PlainTree]] = {}
        for request, computed, one in found:
            prompt = min(at for each, at, _ in found if each is request)
            if id(request) not in expected:
                expected[id(request)] = self.expected(request.text, prompt)
            assert one == expected[id(request)][computed], _MIXED_UP

    @capability("device")
    def test_prompts_in_chunks(self) -> None:
        text, prompt = self.text()
        expected = self.expected(text, prompt)
        for stops in ([1, 2, prompt], [prompt // 2, prompt - 1, prompt], [prompt - 3, prompt]):
            bench = self.bench()
            request = bench.admit(text)
            for stop in stops:
                bench.run([Part(request, stop, sampled=stop == prompt)])
            self.check_grown(bench, request, expected, f"the prompt was computed in chunks up to {stops}. {_BETWEEN}")

    @capability("device")
    def test_cached_prefixes(self) -> None:
        """Another request has computed a prefix, in another row; both go on."""
        text, prompt = self.text()
        expected = self.expected(text, prompt)
        for cached in (1, prompt // 2, prompt - 1):
            bench = self.bench()
            first = bench.admit(text)
            bench.run([Part(first, prompt)])
            other = bench.admit(np.concatenate([text[:cached], (text[cached:] + 1) % VOCAB]), prefix=(first, cached))
            bench.run([Part(other, prompt), Part(first, prompt + 1)])
            why = f"a prefix of {cached} tokens is shared. {_PREFIX}"
            self.check_grown(bench, other, self.expected(other.text, prompt), why)
            self.check_grown(bench, first, expected, why)

    @capability("device")
    def test_accepted_drafts(self) -> None:
        """So many tokens a pass, among drafts that do not stand."""
        text, prompt = self.text()
        expected = self.expected(text, prompt)
        for count in (1, 2, 5):
            bench = self.bench()
            request = bench.admit(text)
            bench.run([Part(request, prompt)])
            bench.draft([request], [MOST])
            while request.computed + count < len(text) - 4:
                bench.run([Part(request, request.computed + count, tree=True)])
                bench.draft([request], [MOST])
            self.check_grown(bench, request, expected, f"each pass has gained {count} tokens. {_ACCEPTED}")

    @capability("device")
    def test_newest_tokens_without_room(self) -> None:
        """Their slots come later, before drafts are asked for, or with the next pass."""
        text, prompt = self.text()
        expected = self.expected(text, prompt)
        for often in (1, 2):
            bench = self.bench()
            request = bench.admit(text)
            while request.computed < len(text) - 1:
                bench.run([Part(request, max(prompt, request.computed + 1), room=False)])
                if request.computed % often == 0:
                    assert self.trees(bench, [request])[0] == expected[request.computed], _ROOM

    @capability("device")
    @pytest.mark.parametrize("last", ["text", "prefix", "newest"])
    def test_rows_are_used_again(self, last: str) -> None:
        """By a request that has computed nothing yet; by one with a cached prefix as long as what the last one had
        computed there; by one that comes as far as the last one, and has no room.
        """
        text, prompt = self.text()
        expected, bench = self.expected(text, prompt), self.bench(rows=2)
        owner, before = bench.admit(text), bench.admit(self.text(1)[0])
        bench.run([Part(before, prompt if last == "newest" else prompt - 4), Part(owner, prompt - 1)])
        bench.draft([before], [MOST])
        row, cached = before.row, before.computed + bench.speculator.lookback
        bench.leave(before)
        request = bench.admit(text, prefix=(owner, cached) if last == "prefix" else None)
        assert request.row == row
        bench.run([Part(request, prompt, room=last != "newest")])
        self.check_grown(bench, request, expected, _ROW)

    # ---- what was not seen ----------------------------------------------------------------------------------------

    @capability("device")
    def test_rows_that_were_never_seen(self) -> None:
        """Where `observe` has failed nothing is known of a request; others get their drafts."""
        text, prompt = self.text()
        bench = self.bench()
        known, unknown = bench.admit(text), bench.admit(self.text(1)[0])
        bench.run([Part(unknown, prompt)], shown=0)
        assert self.trees(bench, [unknown]) == [([int(unknown.text[prompt])], [-1])], _UNKNOWN
        bench.run([Part(known, prompt)])
        found = self.trees(bench, [unknown, known])
        assert found == [([int(unknown.text[prompt])], [-1]), self.expected(text, prompt)[prompt]], _UNKNOWN

    @capability("device")
    @pytest.mark.parametrize("shown", [0, 2], ids=["missed", "again"])
    def test_passes_that_failed(self, shown: int) -> None:
        """Whether it has not seen one, or sees it twice: what is drafted then are trees. The next request in that row
        gets what it ever gets.
        """
        text, prompt = self.text()
        bench = self.bench(rows=1)
        request = bench.admit(self.text(1)[0])
        bench.run([Part(request, prompt)])
        for tree_pass in (False, True, False):
            bench.run([Part(request, request.computed + 1, tree=tree_pass)], shown)
            self.trees(bench, [request])
            bench.run([Part(request, request.computed + 1)])
            self.trees(bench, [request])
        bench.leave(request)
        following = bench.admit(text)
        bench.run([Part(following, prompt)])
        self.check_grown(bench, following, self.expected(text, prompt), _RECOVERS)

    # ---- cost -----------------------------------------------------------------------------------------------------

    @capability("device")
    def test_work_on_the_device_does_not_grow_with_the_text(self) -> None:
        """How many steps of Python a call takes that shows one token and drafts."""
        costs = []
        for length in (SHORT, LONG):
            rig = DeviceRig(self.bench(length=length + _CALLS, rows=2))
            text = np.random.default_rng(length).integers(0, VOCAB, length + _CALLS)
            memo: dict[object, object] = {}
            found = []
            for known in range(length, length + _CALLS):
                row = DraftRow(text[:known], length, "", MOST, memo)
                found.append(count_steps(rig.propose, [row]))
            check(rig.propose([row]), [row])
            costs.append(int(np.median(found)))
        assert costs[1] <= 1.2 * costs[0] + 1000, f"{costs} steps of Python at {SHORT} and {LONG} tokens: {_RESCAN}"


def _facts(speculator: DeviceSpeculator) -> tuple[object, ...]:
    made = speculator
    return made.max_nodes, made.layers, made.taps, made.reserve, made.lookback


def _trees(found: Sequence[tuple[Request, int, PlainTree]]) -> list[PlainTree]:
    return [one for _, _, one in found]


_FREE = "a tree depends on what lies in slots that hold nothing of the request"
_MIXED_UP = "a tree depends on what else is in a pass. Stands says what is whose: `sampled` leaves out those in chunks"
_BETWEEN = "What a token needs of the one before may come from an earlier pass: keep it by the row"
_PREFIX = "The first token of a fresh request is the prefix's last one where there is a lookback: use its states alone"
_ACCEPTED = "Of a pass with drafts `Stands.tokens` stand, in that order, and nothing else"
_ROOM = "a newest token that had no slot is known by its id alone: write what belongs to it once it has one"
_ROW = "what an earlier request has left in the row shows: `Stands.fresh` says when a row begins anew"
_UNKNOWN = "of a row that it has not seen it knows nothing: its tree is the newest token"
_RECOVERS = "after a pass that failed, the row's next request does not get its drafts"
_RESCAN = "it goes through the whole text at each step. Keep what is known of a row, and add what is new"
