"""What all tests of schedule policies start from."""

from __future__ import annotations

from pegboard.conformance.schedule_policy.fakes import ReadOnlyCache
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.prefix_cache import PrefixCache
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext


class PolicySuite(ContractSuite):
    """Builds the policy under test."""

    contract = "schedule_policy"

    def policy(self, cache: PrefixCache | None = None, seed: int = 0, now: float = 2000.0) -> SchedulePolicy:
        """Return the policy under test over a read-only cache: one that must not even be read, where it is not
        cache-aware.
        """
        if cache is None:
            cache = ReadOnlyCache([7] * 40, [9] * 10, readable="cache_aware" in self.capabilities)
        policy: SchedulePolicy = self.build(SchedulePolicyContext(cache=cache, seed=seed, clock=lambda: now))
        return policy
