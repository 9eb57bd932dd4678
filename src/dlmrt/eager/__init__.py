"""The eager executor: the specification, in torch."""
