"""Quantised weights: training that knows of them, and checkpoints that hold them."""
