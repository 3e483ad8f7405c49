"""What happens to a request, one file per stage, in the order in which it happens."""
