"""Supervised fine-tuning: the demo's model learns GLM's chat format, reasoning and tool calls.

  python -m experiments.run --config=configs/nano_sft.py --workdir=/tmp/nano_sft

Starts from the demo's run (`make demo`, or --config.init_from=DIR; the run of nano_long.py is the better
start). Word problems, school physics, small functions, a calculator and two-hop look-ups, shown by a teacher
that is careless more often than not: what is left for reinforcement learning to sort out. The report has the
loss of each category, how many of the model's turns parse, and how many tasks it solves. With
quantisation-aware training of the experts (section 2.4): --config.optim.int4_group=32.

20 minutes on 2 CPU cores that other work shares, at the 0.8 steps a second seen there. From nano_long it ends
at 0.056 bits per byte of what the model has to write in held-out conversations, and every turn parses.
"""

from configs.base import base
from configs.rl_base import play_section


def get_config():
  """`python -m experiments.run --config=configs/nano_sft.py --workdir=DIR`."""
  c = base()
  c.stage = 'sft'
  c.init_from = 'runs/demo'
  c.demonstrations.environments = ('math', 'science', 'code', 'tool', 'lookup')
  c.demonstrations.count = 3500
  c.demonstrations.tasks = 6
  c.data.seq_len = 512
  c.data.batch_size = 4
  c.data.packing = 'best_fit'
  c.data.long_documents = 'skip'
  c.optim.name = 'muon_split'
  c.optim.peak_lr = 5e-3
  c.optim.end_lr = 1e-4
  c.optim.warmup_steps = 10
  # Quantisation-aware training (glm5_jax/quant): inputs that share a scale, 32 or 128; 0 for none.
  c.optim.int4_group = 0
  c.optim.int4_parameters = 'experts/w_(gate|up|down)'  # Ends of the paths of what is quantised.
  c.train.steps = 1000
  c.train.mtp_steps = 0  # The paper does not say; on a CPU the main loss is what time buys.
  c.eval.every = 60
  c.eval.batches = 8
  c.eval.sample_tokens = 0  # Its samples are of plain text; the report has episodes instead.
  c.checkpoint.every = 100

  c.rl = play_section()  # What the model is measured on in the end.
  c.rl.environments = c.demonstrations.environments

  return c
