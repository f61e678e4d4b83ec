"""What a model computes on whole data sets, written to disk and read back."""
