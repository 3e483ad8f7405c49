"""The conformance kit: one suite per contract, and the pytest plugin that runs them."""
