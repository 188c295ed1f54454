"""Log-probabilities and draws."""
