"""The conformance suites of the contracts of media."""
