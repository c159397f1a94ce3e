"""The first run: a 4M-parameter GLM-5 learns Python from the standard library's own source.

  python -m experiments.run --config=configs/nano_pretrain.py --workdir=/tmp/nano

MLA, the lightning indexer with top-64 of 256 keys, 16 experts of which each token uses 2, and three MTP
steps, all trained together from random weights by Muon Split. About 5 minutes on 2 CPU cores from start
to report; 1.70 bits per byte on the held-out files, where `xz -9` reaches 1.90 and `gzip -9` 2.04
(Python 3.11). With AdamW (--config.optim.name=adamw --config.optim.peak_lr=4e-3) it is 1.86 after 450
steps.
"""

from configs.base import base


def get_config():
  """`python -m experiments.run --config=configs/nano_pretrain.py --workdir=DIR`."""
  c = base()
  # nano, see glm5_jax/config.py. Small batches: on a CPU the number of updates is what time buys.
  c.data.seq_len = 256
  c.data.batch_size = 8
  c.optim.name = 'muon_split'
  c.optim.peak_lr = 1e-2
  c.optim.end_lr = 1e-4
  c.optim.warmup_steps = 40
  c.train.steps = 400
  # Three MTP steps with a head each cost more than the rest of this model: one row in eight is enough
  # to train the layer. The paper trains them on everything.
  c.train.mtp_fraction = 0.125
  c.eval.every = 200
  c.eval.batches = 8
  c.checkpoint.every = 200
  return c
