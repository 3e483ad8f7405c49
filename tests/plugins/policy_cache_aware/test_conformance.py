"""The suite of SchedulePolicy on the cache-aware policies, with and without their fall-back to fcfs."""

from __future__ import annotations

from pegboard.conformance.schedule_policy import SchedulePolicyContract


class TestLpm(SchedulePolicyContract):
    provider = "lpm"


class TestLpmWithoutFallback(SchedulePolicyContract):
    provider = "lpm"
    options = {"fallback_above": 0}


class TestLpmWithoutInBatchCheck(SchedulePolicyContract):
    provider = "lpm"
    options = {"in_batch_check_threshold": -1}


class TestDfsWeight(SchedulePolicyContract):
    provider = "dfs-weight"
