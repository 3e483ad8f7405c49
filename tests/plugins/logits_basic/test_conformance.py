"""The suite of LogitsProcessor on the basic processors."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.conformance.logits_processor import LogitsProcessorContract
from pegboard.core.interfaces.sampling import Grammar, SamplingParams


class TestPenalties(LogitsProcessorContract):
    provider = "penalties"

    def asking(self) -> Sequence[SamplingParams]:
        return [
            SamplingParams(repetition_penalty=1.3),
            SamplingParams(frequency_penalty=0.7),
            SamplingParams(presence_penalty=-1.1),
            SamplingParams(repetition_penalty=0.6, frequency_penalty=-0.2, presence_penalty=0.5),
        ]


class TestLogitBias(LogitsProcessorContract):
    provider = "logit_bias"

    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(logit_bias={97: 2.5, 3: -100.0}), SamplingParams(logit_bias={0: 1.0})]


class TestMinNewTokens(LogitsProcessorContract):
    provider = "min_new_tokens"

    def asking(self) -> Sequence[SamplingParams]:
        return [
            SamplingParams(min_new_tokens=1),
            SamplingParams(min_new_tokens=12, stop_token_ids=(97, 2)),
            SamplingParams(min_new_tokens=30, grammar=Grammar("regex", "a*")),
        ]
