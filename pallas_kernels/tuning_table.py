"""Cycles of one chunk of keys for a block of queries, by the blocks that were tried.

Written by `python -m pallas_kernels.tune`; `tuning.py` chooses from it.
"""

CYCLES: dict[tuple[str, str, str, str], dict[tuple[int, ...], int]] = {
  ('tpu7x', 'indexer_kl', 'dense', 'backward'): {
    (16, 4, 512, 256): 4027,
    (16, 4, 1024, 256): 6234,
    (16, 4, 1024, 512): 6352,
  },
  ('tpu7x', 'indexer_kl', 'dense', 'forward'): {
    (16, 4, 512, 256): 2595,
    (16, 4, 1024, 256): 4448,
    (16, 4, 1024, 512): 4465,
  },
  ('tpu7x', 'indexer_kl', 'gather', 'backward'): {
    (8, 4, 512, 256): 5922,
    (16, 4, 512, 256): 6291,
    (16, 4, 512, 512): 6372,
  },
  ('tpu7x', 'indexer_kl', 'gather', 'forward'): {
    (8, 4, 512, 256): 3433,
    (16, 4, 512, 256): 4018,
    (16, 4, 512, 512): 4019,
    (16, 4, 1024, 256): 7454,
  },
  ('tpu7x', 'sparse_mla', 'dense', 'backward'): {
    (16, 4, 512): 7288,
  },
  ('tpu7x', 'sparse_mla', 'dense', 'forward'): {
    (16, 4, 1024): 6024,
  },
  ('tpu7x', 'sparse_mla', 'gather', 'backward'): {
    (8, 2, 512): 6281,
    (16, 4, 512): 7774,
    (16, 4, 512, 1): 11612,
  },
  ('tpu7x', 'sparse_mla', 'gather', 'forward'): {
    (8, 4, 512): 2568,
  },
  ('tpu7x', 'sparse_mla_paged', 'dense', 'forward'): {
    (1, 1, 512): 1233,
    (1, 1, 1024): 1685,
  },
  ('tpu7x', 'sparse_mla_paged', 'gather', 'forward'): {
    (1, 1, 256): 1207,
    (1, 1, 512): 2425,
  },
  ('v5p', 'indexer_kl', 'dense', 'backward'): {
    (16, 4, 512, 256): 7986,
    (16, 4, 1024, 256): 14588,
    (16, 4, 1024, 512): 14823,
  },
  ('v5p', 'indexer_kl', 'dense', 'forward'): {
    (16, 4, 512, 256): 6278,
    (16, 4, 1024, 256): 11961,
    (16, 4, 1024, 512): 12000,
  },
  ('v5p', 'indexer_kl', 'gather', 'backward'): {
    (8, 4, 512, 256): 7450,
    (16, 4, 512, 256): 9404,
    (16, 4, 512, 512): 8824,
  },
  ('v5p', 'indexer_kl', 'gather', 'forward'): {
    (8, 4, 512, 256): 5087,
    (16, 4, 512, 256): 7670,
    (16, 4, 512, 512): 7836,
    (16, 4, 1024, 256): 13725,
  },
  ('v5p', 'sparse_mla', 'dense', 'backward'): {
    (16, 4, 512): 23785,
  },
  ('v5p', 'sparse_mla', 'dense', 'forward'): {
    (16, 4, 1024): 19071,
  },
  ('v5p', 'sparse_mla', 'gather', 'backward'): {
    (4, 2, 512): 8402,
    (8, 2, 512): 12636,
    (8, 2, 512, 1): 12322,
    (8, 4, 512): 13923,
    (16, 4, 512): 24403,
    (16, 4, 512, 1): 24089,
  },
  ('v5p', 'sparse_mla', 'gather', 'forward'): {
    (4, 1, 512): 3169,
    (4, 2, 512): 2734,
    (4, 2, 1024): 5524,
    (8, 4, 512): 5019,
    (8, 4, 1024): 9814,
  },
  ('v5p', 'sparse_mla_paged', 'dense', 'forward'): {
    (1, 1, 512): 1256,
    (1, 1, 1024): 1925,
  },
  ('v5p', 'sparse_mla_paged', 'gather', 'forward'): {
    (1, 1, 256): 1286,
    (1, 1, 512): 2489,
  },
  ('v6e', 'indexer_kl', 'dense', 'backward'): {
    (16, 4, 512, 256): 3946,
    (16, 4, 1024, 256): 6338,
    (16, 4, 1024, 512): 6248,
  },
  ('v6e', 'indexer_kl', 'dense', 'forward'): {
    (16, 4, 512, 256): 2564,
    (16, 4, 1024, 256): 4470,
    (16, 4, 1024, 512): 4504,
  },
  ('v6e', 'indexer_kl', 'gather', 'backward'): {
    (8, 4, 512, 256): 5800,
    (16, 4, 512, 256): 6579,
    (16, 4, 512, 512): 6216,
  },
  ('v6e', 'indexer_kl', 'gather', 'forward'): {
    (8, 4, 512, 256): 3473,
    (16, 4, 512, 256): 4030,
    (16, 4, 512, 512): 4071,
    (16, 4, 1024, 256): 7460,
  },
  ('v6e', 'sparse_mla', 'dense', 'backward'): {
    (16, 4, 512): 7283,
  },
  ('v6e', 'sparse_mla', 'dense', 'forward'): {
    (16, 4, 1024): 6656,
  },
  ('v6e', 'sparse_mla', 'gather', 'backward'): {
    (4, 2, 512): 7028,
    (8, 2, 512): 6509,
    (8, 2, 512, 1): 7689,
    (8, 4, 512): 7307,
    (16, 4, 512): 7889,
    (16, 4, 512, 1): 9049,
  },
  ('v6e', 'sparse_mla', 'gather', 'forward'): {
    (8, 4, 512): 2610,
  },
  ('v6e', 'sparse_mla_paged', 'dense', 'forward'): {
    (1, 1, 512): 1263,
    (1, 1, 1024): 1728,
  },
  ('v6e', 'sparse_mla_paged', 'gather', 'forward'): {
    (1, 1, 256): 1266,
    (1, 1, 512): 2424,
  },
}
