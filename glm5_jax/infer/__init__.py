"""Inference over the latent cache."""
