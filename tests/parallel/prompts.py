"""What servers of this folder are asked, each prompt for so many greedy tokens."""

from __future__ import annotations

LENGTH = 32
PROMPTS = ([5, 6, 7, 8], [9, 10, 11] * 20, [40, 41] * 9)
