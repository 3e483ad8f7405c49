"""The n-gram speculator against the contract's suite, with several sets of options."""

from __future__ import annotations

from pegboard.conformance.speculator import SpeculatorContract


class TestNgram(SpeculatorContract):
    provider = "ngram"


class TestShared(SpeculatorContract):
    provider = "ngram"
    options = {"shared": True, "capacity": 300}


class TestShortMatches(SpeculatorContract):
    provider = "ngram"
    options = {"min_match": 1, "max_match": 1, "longest_pause": 1}
