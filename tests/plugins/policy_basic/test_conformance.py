"""The suite of SchedulePolicy on the policies that look at the queue alone."""

from __future__ import annotations

from pegboard.conformance.schedule_policy import SchedulePolicyContract


class TestFcfs(SchedulePolicyContract):
    provider = "fcfs"


class TestLof(SchedulePolicyContract):
    provider = "lof"


class TestRandom(SchedulePolicyContract):
    provider = "random"


class TestPriority(SchedulePolicyContract):
    provider = "priority"


class TestPriorityWithoutAging(SchedulePolicyContract):
    provider = "priority"
    options = {"aging": None, "preempt_threshold": 1}
    expected_failures = {
        "test_nobody_is_overtaken_for_ever": "aging is off",
        "test_waiting_does_not_start_anew_after_a_retraction": "aging is off",
    }


class TestPriorityWithoutPreemption(SchedulePolicyContract):
    provider = "priority"
    options = {"preempt": False}
    expected_failures = {"test_somebody_makes_way": "preemption is off"}


class TestSrtf(SchedulePolicyContract):
    provider = "srtf"
