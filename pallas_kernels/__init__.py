"""Pallas kernels for DeepSeek sparse attention on TPU. Every op has a reference in plain jax."""

from pallas_kernels.dense_mla import dense_mla as dense_mla
from pallas_kernels.indexer.api import indexer_topk as indexer_topk
from pallas_kernels.indexer.paged import indexer_topk_paged as indexer_topk_paged
from pallas_kernels.indexer_kl.api import indexer_kl as indexer_kl
from pallas_kernels.indexer_kl.reference import Visible as Visible
from pallas_kernels.sparse_mla.api import sparse_mla as sparse_mla
from pallas_kernels.sparse_mla.paged import sparse_mla_paged as sparse_mla_paged
