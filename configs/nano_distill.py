"""On-policy cross-stage distillation (section 3.5, eq. 2): what a later stage lost, its teachers give back.

  python -m experiments.run --config=configs/nano_distill.py --workdir=/tmp/nano_distill \
      --config.init_from=LATER --config.rl.teachers.math=EARLIER ...

The student starts from the last run, samples one answer to every task, and each of its tokens is compared
with what the teacher of that domain makes of it. Teachers are the folders of earlier runs; here all domains
have one, the run of nano_reasoning_rl.py. Sized for 5 minutes on 2 CPU cores, not timed on idle ones; the
report has the accuracy on held-out tasks before and after, and the teachers', no bits per byte.
"""

from ml_collections import ConfigDict

from configs.rl_base import rl_base


def get_config():
  """`python -m experiments.run --config=configs/nano_distill.py --workdir=DIR`."""
  c = rl_base()
  c.stage = 'distill'
  c.init_from = 'runs/rl'
  c.rl.environments = ('math', 'science', 'code', 'tool', 'lookup')
  c.rl.advantage = 'teacher'
  c.rl.teachers = ConfigDict(dict.fromkeys(c.rl.environments, 'runs/rl'))
  c.rl.group_size = 1  # The paper's.
  c.rl.groups = 128  # The paper: 1024.
  c.train.steps = 40
  c.eval.every = 20
  c.checkpoint.every = 10
  return c
