"""What plugin authors may build on. Public, documented, and lazy about heavy imports."""
