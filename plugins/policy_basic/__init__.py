"""Schedule policies that look at the queue alone."""

from pegboard.core.interfaces.plugin import Plugin, Provider

_MODULE = "pegboard.plugins.policy_basic.policies"
_URGENCY = "pegboard.plugins.policy_basic.urgency"
_OPTIONS = "pegboard.plugins.policy_basic.options"

plugin = Plugin(
    name="policy_basic",
    version="0.1.0",
    summary="fcfs, lof, random, priority and srtf",
    providers=(
        Provider(
            contract="schedule_policy",
            name="fcfs",
            factory=f"{_MODULE}:FcfsPolicy",
            summary="first come, first served",
            rank=10,
        ),
        Provider(
            contract="schedule_policy",
            name="lof",
            factory=f"{_MODULE}:LofPolicy",
            summary="longest output first",
        ),
        Provider(
            contract="schedule_policy",
            name="random",
            factory=f"{_MODULE}:RandomPolicy",
            summary="a random order, from scheduler.seed",
        ),
        Provider(
            contract="schedule_policy",
            name="priority",
            factory=f"{_URGENCY}:PriorityPolicy",
            summary="by the request's priority and how long it has waited, with preemption",
            config=f"{_OPTIONS}:PriorityOptions",
            provides=frozenset({"aging", "preempts"}),
        ),
        Provider(
            contract="schedule_policy",
            name="srtf",
            factory=f"{_URGENCY}:SrtfPolicy",
            summary="shortest remaining time first",
            config=f"{_OPTIONS}:SrtfOptions",
            provides=frozenset({"aging"}),
        ),
    ),
)
