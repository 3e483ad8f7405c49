"""`pegboard chat`: a conversation in the terminal, with a server or with an engine of its own."""
