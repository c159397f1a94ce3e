"""Supervised fine-tuning: the demo's model learns GLM's chat format, reasoning and tool calls.

  python -m experiments.run --config=configs/nano_sft.py --workdir=/tmp/nano_sft

Starts from the demo's run (`make demo`, or --config.init_from=DIR). Word problems, a calculator, two-hop
look-ups and small functions, shown by a teacher that is careless half of the time: what is left for
reinforcement learning to sort out. Sized for 5 minutes on 2 CPU cores, not timed; bits per byte of what the model has
to write not measured yet.
"""

from configs.base import base


def get_config():
  """`python -m experiments.run --config=configs/nano_sft.py --workdir=DIR`."""
  c = base()
  c.stage = 'sft'
  c.init_from = 'runs/demo'
  c.demonstrations.environments = ('math', 'tool', 'lookup', 'code')
  c.demonstrations.count = 1500
  c.demonstrations.tasks = 6
  c.data.seq_len = 512
  c.data.batch_size = 4
  c.data.packing = 'best_fit'
  c.data.long_documents = 'skip'
  c.optim.name = 'muon_split'
  c.optim.peak_lr = 5e-3
  c.optim.end_lr = 1e-4
  c.optim.warmup_steps = 10
  c.train.steps = 300
  c.train.mtp_steps = 0  # The paper does not say; on a CPU the main loss is what time buys.
  c.eval.every = 50
  c.eval.batches = 8
  c.eval.sample_tokens = 0  # Its samples are of plain text.
  c.checkpoint.every = 100
  return c
