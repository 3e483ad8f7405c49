"""What happens to a request in the scheduler process, one file per stage, in the order in which it happens.

arrival -> scheduler (queue, admission, memory, batch) -> worker (forward, sampling) -> results. What comes before and
after, in the API process, is `pegboard.core.frontend`.
"""
