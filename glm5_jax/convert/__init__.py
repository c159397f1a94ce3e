"""Hugging Face checkpoints: `load_hf` reads them into our parameter tree, `save_hf` writes them."""

from glm5_jax.convert.hf_load import load_hf
from glm5_jax.convert.hf_save import save_hf
from glm5_jax.convert.storage import CheckpointError

__all__ = ['CheckpointError', 'load_hf', 'save_hf']
