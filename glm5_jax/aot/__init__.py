"""What a training step will need on machines that are not here: compiled for them, and read."""
