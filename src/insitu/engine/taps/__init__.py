"""Places that are served from inside the graphs."""
