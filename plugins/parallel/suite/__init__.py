"""The conformance suites of communicators and of what starts ranks."""
