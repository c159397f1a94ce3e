"""A package, so that no installed module called `tests` comes before it."""
