"""The suite of SchedulePolicy on the policies that look at the queue alone."""

from __future__ import annotations

from pegboard.core.testing.schedule_policy import SchedulePolicyContract


class TestFcfs(SchedulePolicyContract):
    provider = "fcfs"


class TestLof(SchedulePolicyContract):
    provider = "lof"


class TestRandom(SchedulePolicyContract):
    provider = "random"


class TestPriority(SchedulePolicyContract):
    provider = "priority"
