"""For prefix caches and schedule policies: pages and radix trees."""
