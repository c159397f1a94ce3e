"""Supervised fine-tuning: the demo's model learns GLM's chat format, reasoning and tool calls.

  python -m experiments.run --config=configs/nano_sft.py --workdir=/tmp/nano_sft

Starts from the demo's run (`make demo`, or --config.init_from=DIR). Word problems, a calculator, two-hop
look-ups and small functions, shown by a teacher that is careless half of the time: what is left for
reinforcement learning to sort out. About 3 minutes on 2 CPU cores; bits per byte of what the model has
to write not measured yet.
"""

from configs.base import base


def get_config():
  """`python -m experiments.run --config=configs/nano_sft.py --workdir=DIR`."""
  c = base()
  c.stage = 'sft'
  c.init_from = 'runs/demo'
  c.demonstrations.environments = ('math', 'tool', 'lookup', 'code')
  c.demonstrations.count = 2000
  c.data.seq_len = 256
  c.data.batch_size = 8
  c.data.packing = 'best_fit'
  c.data.long_documents = 'skip'
  c.optim.name = 'muon_split'
  c.optim.peak_lr = 3e-3
  c.optim.end_lr = 1e-4
  c.optim.warmup_steps = 10
  c.train.steps = 200
  c.train.mtp_fraction = 0.125
  c.eval.every = 50
  c.eval.batches = 8
  c.eval.sample_tokens = 0  # Its samples are of plain text.
  c.checkpoint.every = 100
  return c
