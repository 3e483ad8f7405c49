"""Media in the scheduler's process: whose pieces are encoded, the books of what is, and the states themselves."""
