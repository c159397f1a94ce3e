"""The same model and recipe as nano_pretrain.py for six times as long.

  python -m experiments.run --config=configs/nano_long.py --workdir=/tmp/nano_long

Sized for 30 minutes on 2 CPU cores, not timed; bits per byte not measured yet.
"""

from configs import nano_pretrain


def get_config():
  """`python -m experiments.run --config=configs/nano_long.py --workdir=DIR`."""
  c = nano_pretrain.get_config()
  c.train.steps = 2400
  c.optim.warmup_steps = 100
  c.eval.every = 400
  c.checkpoint.every = 400
  return c
