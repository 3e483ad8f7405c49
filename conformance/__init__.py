"""The conformance kit: one suite for each contract, and what plugin authors need to run it."""
