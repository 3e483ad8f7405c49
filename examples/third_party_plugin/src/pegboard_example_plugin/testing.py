"""The conformance classes that the record names: for `pegboard plugins check`, and for this package's own tests.

They are imported for a check and never to serve. The tests come from Pegboard's suites; a class says what a suite
cannot know of a provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pegboard.conformance.admission_gate import AdmissionGateContract, gated_request
from pegboard.conformance.api_router import ApiRouterContract
from pegboard.conformance.logits_processor import LogitsProcessorContract
from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.conformance.sampler import SamplerContract, exact_probabilities
from pegboard.conformance.schedule_policy import SchedulePolicyContract
from pegboard.conformance.tool_parser import ToolParserContract
from pegboard.core.interfaces import GateState, SamplingParams
from pegboard.plugins.speculation.suite import SpeculatorContract
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT

from pegboard_example_plugin.options import TopNSigmaOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pegboard.core.interfaces import AdmissionGate, Req


class TestShortestPrompt(SchedulePolicyContract):
    provider = "shortest_prompt"


class TestShortestPromptInSteps(SchedulePolicyContract):
    provider = "shortest_prompt"
    options = {"bucket": 16}


class TestWholePrompt(PrefixCacheContract):
    provider = "whole_prompt"


class TestWholePromptOldestFirst(PrefixCacheContract):
    provider = "whole_prompt"
    options = {"evict": "oldest"}


class TestNoRepeat(LogitsProcessorContract):
    provider = "no_repeat"

    def asking(self) -> Sequence[SamplingParams]:
        """Its parameter must be given, so the suite cannot make a request by itself."""
        return [SamplingParams(extra={"no_repeat": {"size": size}}) for size in (1, 2, 3)]


class TestTopNSigma(SamplerContract):
    provider = "top_n_sigma"

    def asking(self) -> Sequence[SamplingParams]:
        """What requests may say to it."""
        return [SamplingParams(extra={"top_n_sigma": {"n": n}}) for n in (0.2, 1.0, 20.0)]

    def probabilities(self, logits: NDArray[np.floating[Any]], row: Mapping[str, Any]) -> NDArray[np.float64]:
        """The distribution in other words than the sampler's: what is too far below the largest, and then the rest."""
        options = self.make_options()
        assert isinstance(options, TopNSigmaOptions)
        counting = logits[logits > LAST_RESORT / 2].astype(np.float64)
        within = logits >= counting.max() - options.n * counting.std()
        return exact_probabilities(np.where(within, logits, -np.inf), row)


class TestBigrams(SpeculatorContract):
    provider = "bigrams"


class TestLongBigrams(SpeculatorContract):
    provider = "bigrams"
    options = {"nodes": 64}


class TestRateLimit(AdmissionGateContract):
    provider = "rate_limit"
    options = {"per_second": 5.0, "burst": 3, "waiting": 4}
    params = ()

    def unconcerned_request(self) -> Req | None:
        """There is none: every request concerns it."""
        return None

    def blocked_request(self, gate: AdmissionGate) -> Req:
        """One that comes when its key has nothing left."""
        while True:
            before = gated_request()
            if gate.enter(before).state is not GateState.OPEN:
                gate.cancel(before)
                return gated_request()


class TestCompletionLines(ApiRouterContract):
    provider = "completion_lines"


class TestBracketed(ToolParserContract):
    provider = "bracketed"


class TestOtherMarkers(ToolParserContract):
    provider = "bracketed"
    options = {"begin": "<call>", "end": "</call>"}
