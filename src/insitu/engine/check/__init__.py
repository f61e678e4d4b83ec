"""Whether what a block sees of a model is right."""
