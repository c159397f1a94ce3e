"""Sparse multi-head latent attention: see api.py, and paged.py for decoding."""

from pallas_kernels.sparse_mla.api import Tuning, sparse_mla
from pallas_kernels.sparse_mla.paged import (
  pack_pages,
  read_pages,
  sparse_mla_paged,
  unpack_pages,
  write_pages,
)

__all__ = [
  'Tuning',
  'pack_pages',
  'read_pages',
  'sparse_mla',
  'sparse_mla_paged',
  'unpack_pages',
  'write_pages',
]
