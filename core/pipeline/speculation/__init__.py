"""Speculation: which tokens are proposed, how they are packed and verified, and whether that pays."""
