"""What happens to a request in the API process: it is checked and tokenised, and its outputs become text."""
