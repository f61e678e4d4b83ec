"""The room that knows vLLM. Importing it does not import vLLM: that waits until an engine is built."""
