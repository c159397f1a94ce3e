"""Model FLOPs of a training step, in closed form: what the mathematics needs, not what runs.

A multiply-add is 2 FLOPs, and the backward pass costs twice the forward, so a matrix of n elements
costs 6 n per token. Counted: every matrix that a token passes (of the experts only the chosen and
the shared ones), the attention scores and values of the *selected* keys, the index scores of *all*
visible keys (they are trained by their own loss, so they count three times as well), the output
head, and every MTP step. While only the indexers train, the rest has a forward pass without a head;
while they do not, they do not run. Not counted: embedding look-up, norms, softmax, rope, top-k, the optimizer,
and whatever is computed and masked away or recomputed. The ratio to a machine's peak is therefore
the usual model-FLOPs utilisation.
"""

from typing import NamedTuple

import numpy as np

from glm5_jax.config import BlockSpec, ModelConfig
from glm5_jax.train.stages import EVERYTHING, Stage


class Pairs(NamedTuple):
  """Query-key pairs of a batch: visible to attention before selection, and after it."""

  visible: int
  selected: int


def count_pairs(positions: np.ndarray, weights: np.ndarray | None, topk: int | None) -> Pairs:
  """Pairs of a packed batch: position p sees p + 1 keys, of which it selects at most `topk`.

  Args:
    positions: [B, T] int, restarting at 0 for every packed document.
    weights: [B, T], positions with weight 0 (padding) are left out; None counts all.
    topk: `index_topk`, or None where every visible key is attended to.
  """
  visible = positions.astype(np.int64) + 1
  if weights is not None:
    visible = np.where(weights > 0, visible, 0)
  selected = visible if topk is None else np.minimum(visible, topk)
  return Pairs(int(visible.sum()), int(selected.sum()))


def infilling_positions(segment_ids: np.ndarray, prefix: np.ndarray) -> np.ndarray:
  """What `count_pairs` needs in place of the positions where a segment's Part A, which ends at slot
  `prefix`, is visible to all of it; all arrays [B, T].
  """
  slots = np.arange(segment_ids.shape[1])
  new = np.diff(segment_ids, axis=1, prepend=0) != 0
  start = np.maximum.accumulate(np.where(new, slots, 0), axis=1)
  return np.maximum(slots, prefix - 1) - start


def matmul_params(config: ModelConfig, mtp_steps: int = 0) -> int:
  """Matrix elements that one token passes in a forward pass with `mtp_steps` MTP steps."""
  blocks = sum(_block_params(config, block) for block in _blocks(config, mtp_steps))
  heads = (1 + mtp_steps) * config.hidden_size * config.vocab_size
  return blocks + heads + mtp_steps * 2 * config.hidden_size**2


def train_flops(
  config: ModelConfig,
  tokens: int,
  pairs: Pairs,
  mtp_steps: int = 0,
  mtp_fraction: float = 1.0,
  stage: Stage = EVERYTHING,
) -> int:
  """FLOPs of forward and backward over `tokens` tokens with the given query-key `pairs`.

  An MTP step is counted like one more layer over `mtp_fraction` of the same tokens and pairs (it sees
  up to `mtp_steps` fewer of them).
  """
  alone, everywhere = (_train_flops(config, tokens, pairs, n, stage) for n in (0, mtp_steps))
  return alone + round(mtp_fraction * (everywhere - alone))


def _train_flops(
  config: ModelConfig, tokens: int, pairs: Pairs, mtp_steps: int, stage: Stage
) -> int:
  attention = index = index_params = 0
  head_dims = config.qk_head_dim + config.v_head_dim
  for block in _blocks(config, mtp_steps):
    sparse = block.indexer != 'none' and config.sparse_attention
    keys = pairs.selected if sparse else pairs.visible
    attention += keys * config.num_attention_heads * head_dims
    if block.indexer == 'full':
      index += pairs.visible * config.index_n_heads * config.index_head_dim
      index_params += _indexer_params(config)
  main = (matmul_params(config, mtp_steps) - index_params) * tokens + attention
  if not stage.main:
    main -= (1 + mtp_steps) * config.hidden_size * config.vocab_size * tokens
  index += index_params * tokens
  return (6 if stage.main else 2) * main + (6 * index if stage.indexers else 0)


def _blocks(config: ModelConfig, mtp_steps: int) -> list[BlockSpec]:
  """Every decoder layer that runs, MTP steps included."""
  mtp = [config.mtp_block] * mtp_steps
  if config.index_share_for_mtp_iteration:  # Later steps reuse the selection of the first.
    mtp[1:] = [BlockSpec(b.mlp, 'shared') for b in mtp[1:]]
  return [*config.blocks, *mtp]


def _block_params(c: ModelConfig, block: BlockSpec) -> int:
  d = c.hidden_size
  if c.attention == 'mla':
    n, q, l = c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
    attention = d * q + q * n * c.qk_head_dim + d * (l + c.qk_rope_head_dim)
    attention += l * n * (c.qk_nope_head_dim + c.v_head_dim) + n * c.v_head_dim * d
  else:
    n, m = c.num_attention_heads, c.num_key_value_heads
    attention = d * (n + m) * c.qk_head_dim + d * m * c.v_head_dim + n * c.v_head_dim * d
  if block.indexer == 'full':
    attention += _indexer_params(c)
  if block.mlp == 'dense':
    return attention + 3 * d * c.intermediate_size
  experts = c.num_experts_per_tok + c.n_shared_experts
  return attention + d * c.n_routed_experts + 3 * experts * d * c.moe_intermediate_size


def _indexer_params(c: ModelConfig) -> int:
  return c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * (
    c.index_head_dim + c.index_n_heads
  )
