"""For API plugins: request bodies, errors, answers as streams."""
