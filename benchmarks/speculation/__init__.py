"""What speculative decoding brings, and what it costs."""

from pegboard.toolkit.system.threads import yield_when_waiting

yield_when_waiting()  # before any module of the benchmark imports torch, as a server does
