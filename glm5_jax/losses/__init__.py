"""Training objectives: pure, jittable functions of arrays."""
