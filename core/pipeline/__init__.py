"""What happens to a request, one file per stage, in the order in which it happens.

intake -> scheduler (queue, admission, memory, batch) -> worker (forward, sampling) -> results -> outputs (detokenise).
"""
