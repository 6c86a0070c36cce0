"""A run: its recipe, its directory, its checkpoints."""
