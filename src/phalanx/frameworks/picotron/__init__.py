"""picotron: a small trainer of Llama's architecture in four parallelisms."""
