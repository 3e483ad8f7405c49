"""What makes this policy the one that it is; the suite cannot know that."""

from pegboard.conformance.fakes import EmptyCache, make_req
from pegboard.core.interfaces import SchedulePolicyContext

from pegboard_example_plugin.options import ShortestPromptOptions
from pegboard_example_plugin.policy import ShortestPromptPolicy


def order(bucket: int, *lengths: int) -> list[int]:
    policy = ShortestPromptPolicy(ShortestPromptOptions(bucket=bucket), SchedulePolicyContext(EmptyCache()))
    waiting = [make_req(f"r{index}", range(length)) for index, length in enumerate(lengths)]
    return [req.input_len for req in policy.order(waiting, [])]


def test_shortest_first() -> None:
    assert order(1, 30, 10, 20) == [10, 20, 30]


def test_steps_keep_the_order_of_arrival() -> None:
    assert order(16, 30, 15, 20, 10) == [15, 10, 30, 20]
