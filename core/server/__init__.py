"""The server: two processes, the messages between them, and the supervisor that restarts the scheduler."""
