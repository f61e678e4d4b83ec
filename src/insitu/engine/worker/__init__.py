"""What runs inside vLLM: beside a model runner, and in its scheduler."""
