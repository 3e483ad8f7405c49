"""For grammar backends, and for APIs that take grammars: GBNF, JSON schemas, lengths of expressions."""
