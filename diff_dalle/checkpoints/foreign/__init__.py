"""Checkpoints of other projects: recognized by the names and shapes of their weights, and mapped onto our networks."""
