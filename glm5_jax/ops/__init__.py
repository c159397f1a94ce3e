"""Array mathematics of GLM-5: pure functions of arrays, no Flax, no state."""
