"""Experiment configs: plain files with a get_config() each. They import ml_collections only."""
