"""The n-gram speculator against the contract's suite, with several sets of options."""

from __future__ import annotations

from pegboard.plugins.speculation.suite import SpeculatorContract


class TestNgram(SpeculatorContract):
    provider = "ngram"


class TestShared(SpeculatorContract):
    provider = "ngram"
    options = {"shared": True, "capacity": 300}


class TestShortMatches(SpeculatorContract):
    provider = "ngram"
    options = {"min_match": 1, "max_match": 1, "longest_pause": 1}


class TestThresholds(SpeculatorContract):
    provider = "ngram"
    options = {"accept": "thresholds"}


class TestLowThresholds(SpeculatorContract):
    provider = "ngram"
    options = {"accept": "thresholds", "accept_threshold_single": 0.3, "accept_threshold_acc": 0.5}
    lossless = False
