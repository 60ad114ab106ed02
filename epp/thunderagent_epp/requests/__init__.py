"""What an inference request says: session identity, size, streaming, and usage in the answer."""
