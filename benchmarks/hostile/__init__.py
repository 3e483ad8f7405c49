"""What one client may cost the others: requests meant to hurt, and what is measured beside them."""
