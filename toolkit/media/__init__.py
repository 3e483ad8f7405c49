"""Pictures and videos as APIs state them, and what APIs ask of a model that takes them."""
