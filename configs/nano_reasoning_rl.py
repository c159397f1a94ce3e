"""Reasoning RL: GRPO with IcePop (section 3.2) on four domains of verifiable tasks, in equal parts.

  python -m experiments.run --config=configs/nano_reasoning_rl.py --workdir=/tmp/nano_rl

Mathematics, science, code, and reasoning with a tool. Starts from the run of nano_sft.py
(--config.init_from=DIR). 8 minutes on 2 CPU cores that other work shared. Nothing here is measured in bits
per byte: the report has the accuracy on held-out tasks before and after, docs/post_training.md that of three
seeds.
"""

from configs.rl_base import rl_base


def get_config():
  """`python -m experiments.run --config=configs/nano_reasoning_rl.py --workdir=DIR`."""
  c = rl_base()
  c.init_from = 'runs/sft'
  c.train.steps = 40
  c.eval.every = 20
  c.checkpoint.every = 10
  return c
