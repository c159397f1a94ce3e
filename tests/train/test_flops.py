"""The closed form of the model's FLOPs against known counts."""

import numpy as np

from glm5_jax import config as configs
from glm5_jax.train import flops


def test_active_parameters():
  # Table 10 says 40B active. The embedding is a look-up and does not count here.
  assert round(flops.matmul_params(configs.glm5_2()) / 1e9, 1) == 40.3
  assert round(flops.matmul_params(configs.glm5()) / 1e9, 1) == 40.8


def test_pairs_of_a_packed_row():
  positions = np.array([[0, 1, 2, 0, 1, 0]])
  weights = np.array([[1, 1, 1, 1, 1, 0]])
  assert flops.count_pairs(positions, weights, None) == (1 + 2 + 3 + 1 + 2, 9)
  assert flops.count_pairs(positions, weights, 2) == (9, 1 + 2 + 2 + 1 + 2)
  assert flops.count_pairs(positions, None, 2) == (10, 9)


def test_terms_add_up():
  config = configs.nano(
    num_hidden_layers=4, num_attention_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=48, index_n_heads=4, index_head_dim=32,
  )  # fmt: skip
  base = flops.train_flops(config, 1, flops.Pairs(0, 0))
  assert base == 6 * flops.matmul_params(config)
  score_and_value = 32 + 16 + 48
  assert flops.train_flops(config, 1, flops.Pairs(0, 1)) - base == 6 * 4 * 4 * score_and_value
  assert flops.train_flops(config, 1, flops.Pairs(1, 0)) - base == 6 * 4 * 4 * 32
  dense = config.replace(sparse_attention=False)
  assert flops.train_flops(dense, 1, flops.Pairs(1, 1)) == flops.train_flops(
    config, 1, flops.Pairs(1, 1)
  )
  one = flops.matmul_params(config, 1) - flops.matmul_params(config)
  assert flops.matmul_params(config, 3) - flops.matmul_params(config) == 3 * one


def test_index_share_drops_the_shared_layers_indexers():
  full, shared = configs.glm5(), configs.glm5_2()
  indexer = 2048 * 32 * 128 + 6144 * 128 + 6144 * 32
  assert flops.matmul_params(full) - flops.matmul_params(shared) == (78 - 21) * indexer


def test_mtp_on_a_part_of_the_batch():
  config, pairs = configs.nano(), flops.Pairs(5000, 3000)
  none, some, full = (
    flops.train_flops(config, 100, pairs, 3 if f else 0, f) for f in (0.0, 0.25, 1.0)
  )
  assert some == none + (full - none) // 4
