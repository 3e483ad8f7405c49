"""Everything that Pegboard demands of a policy and of a cache, in two lines each."""

from pegboard.core.testing.prefix_cache import PrefixCacheContract
from pegboard.core.testing.schedule_policy import SchedulePolicyContract


class TestShortestPrompt(SchedulePolicyContract):
    provider = "shortest_prompt"


class TestShortestPromptInSteps(SchedulePolicyContract):
    provider = "shortest_prompt"
    options = {"bucket": 16}


class TestWholePrompt(PrefixCacheContract):
    provider = "whole_prompt"
