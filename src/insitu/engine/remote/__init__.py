"""A model on a server, for a client that has neither vLLM nor a GPU."""
