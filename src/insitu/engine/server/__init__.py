"""insitu's routes on vLLM's own OpenAI-compatible server, on the same engine."""
