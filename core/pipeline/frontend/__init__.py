"""The stages that run in the API process: a request is checked and tokenised, and outputs become text."""
