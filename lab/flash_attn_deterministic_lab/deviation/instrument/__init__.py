"""Looking into one's own models: captured calls, gradients, weights, token log-probabilities."""
