"""Side-by-side measurements against other implementations."""
