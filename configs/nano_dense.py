"""The yardstick of the demo: a plain dense transformer with AdamW, on the same files.

  python -m experiments.run --config=configs/nano_dense.py --workdir=/tmp/dense

Four layers of multi-head attention and SwiGLU, 5.3M parameters of which 2.1M are embedding and head; no
experts, no sparse attention, no latents, no MTP. About 10 minutes on 2 CPU cores; 1.75 bits per byte on
the held-out files.
"""

from configs.base import base, model


def get_config():
  """`python -m experiments.run --config=configs/nano_dense.py --workdir=DIR`."""
  c = base()
  c.model = model(
    'nano', attention='gqa', sparse_attention=False, hidden_size=256, num_hidden_layers=4,
    first_k_dense_replace=4, intermediate_size=683, num_attention_heads=4, num_key_value_heads=4,
  )  # fmt: skip
  c.data.seq_len = 256
  c.data.batch_size = 8
  c.optim.peak_lr = 2e-3
  c.optim.end_lr = 1e-4
  c.optim.warmup_steps = 40
  c.train.steps = 600
  c.train.mtp_steps = 0
  c.eval.every = 200
  c.eval.batches = 8
  c.checkpoint.every = 200
  return c
