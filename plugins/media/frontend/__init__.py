"""Media on their way from a client's request to a prompt that is laid out."""
