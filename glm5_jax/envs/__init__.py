"""Environments: tasks, the tools they offer, and the judges of what a model did with them."""
