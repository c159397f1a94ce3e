"""Thin Flax modules: they declare parameters and call ops. `model.py` is the whole GLM-5."""
