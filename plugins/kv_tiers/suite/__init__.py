"""Suites of the contracts of tiers, and of prefix caches that use them."""
