"""Optimizer state dicts: by name and whole or sharded, and back, under torch's names old and new. Layer 6."""


class OptimizerStates:
    """The part of the class that is about optimizer states."""
