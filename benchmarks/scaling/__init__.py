"""How cost grows with model size, chips and row length, by the TPU compiler: see __main__.py."""
