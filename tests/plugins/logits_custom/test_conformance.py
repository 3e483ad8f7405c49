"""The suite of LogitsProcessor on the custom processors."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.conformance.logits_processor import LogitsProcessorContract
from pegboard.core.interfaces.sampling import Grammar, SamplingParams


class TestDry(LogitsProcessorContract):
    provider = "dry"

    def asking(self) -> Sequence[SamplingParams]:
        return [
            SamplingParams(extra={"dry": {}}),
            SamplingParams(extra={"dry": {"multiplier": 2, "base": 1.1, "allowed_length": 1, "range": 20}}),
            SamplingParams(extra={"dry": {"sequence_breakers": ["b"], "allowed_length": 1}}),
        ]


class TestDryInAShortRange(LogitsProcessorContract):
    provider = "dry"
    options = {"longest_range": 16}


class TestBadWords(LogitsProcessorContract):
    provider = "bad_words"

    def asking(self) -> Sequence[SamplingParams]:
        return [
            SamplingParams(extra={"bad_words": {"words": ["a", "ba", " c"]}}),
            SamplingParams(extra={"bad_words": {"words": ["ab"]}}),
            SamplingParams(extra={"bad_words": {"words": ["b"]}}, grammar=Grammar("regex", "a*")),
        ]


class TestAllowedTokenIds(LogitsProcessorContract):
    provider = "allowed_token_ids"

    def asking(self) -> Sequence[SamplingParams]:
        return [
            SamplingParams(extra={"allowed_token_ids": {"ids": [97, 98, 97]}}),
            SamplingParams(extra={"allowed_token_ids": {"ids": [3]}}, min_new_tokens=4),
            SamplingParams(extra={"allowed_token_ids": {"ids": [50]}}, grammar=Grammar("regex", "a*")),
        ]
