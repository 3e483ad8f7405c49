"""The conformance suites of the contracts of quantised weights."""
