"""What runs beside the user: the model, its traces and the engine as they see it."""
