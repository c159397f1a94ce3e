"""`indexer_kl`: the lightning indexer's loss, over the selection or over all visible keys."""

from pallas_kernels.indexer_kl.api import Tuning, indexer_kl
from pallas_kernels.indexer_kl.reference import Visible

__all__ = ['Tuning', 'Visible', 'indexer_kl']
