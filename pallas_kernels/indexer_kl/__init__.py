"""`indexer_kl`: the lightning indexer's loss over the selection."""

from pallas_kernels.indexer_kl.api import indexer_kl as indexer_kl
