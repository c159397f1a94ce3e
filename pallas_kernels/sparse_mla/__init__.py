"""Sparse multi-head latent attention: see api.py."""

from pallas_kernels.sparse_mla.api import Tuning, sparse_mla

__all__ = ['Tuning', 'sparse_mla']
