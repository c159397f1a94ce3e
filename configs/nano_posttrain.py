"""Post-training in one command: a model from scratch, SFT, two stages of RL, and distillation.

  python -m experiments.run --config=configs/nano_posttrain.py --workdir=/tmp/posttrain

Section 3 of the paper in its order, each stage from the checkpoint of the one before; the same command
continues what was stopped. So that one command is all it takes, it begins with the demo's pre-training;
a run there is already saves that (a nano_long run is the better start):

  python -m experiments.run --config=configs/nano_posttrain.py --workdir=/tmp/posttrain \
      --config.order="('sft', 'reasoning_rl', 'agent_rl', 'distill')" --config.stages.sft.init_from=runs/demo

The second RL stage is on one domain alone, an agent's look-ups, and what it forgets of the others
distillation gives back: every domain has the stage as its teacher that trained it (section 3.5). The
report of /tmp/posttrain has a table of the accuracy on held-out tasks, domain by domain, before and after
every stage. The second form took 39 minutes on 2 CPU cores that other work shared, docs/post_training.md has
its table; bits per byte of the pre-trained model are those of nano_pretrain.py or nano_long.py.
"""

from ml_collections import ConfigDict

from configs import nano_distill, nano_pretrain, nano_reasoning_rl, nano_sft

DOMAINS = ('math', 'science', 'code', 'tool')
AGENT = 'lookup'


def get_config(stage: str = ''):
  """`python -m experiments.run --config=configs/nano_posttrain.py --workdir=DIR`."""
  c = ConfigDict()
  c.order = ('pretrain', 'sft', 'reasoning_rl', 'agent_rl', 'distill')
  c.stages = ConfigDict()
  c.stages.pretrain = nano_pretrain.get_config()
  c.stages.sft = nano_sft.get_config()
  c.stages.sft.init_from = ''
  c.stages.reasoning_rl = reasoning_rl()
  c.stages.agent_rl = agent_rl()
  c.stages.distill = distill()
  return c.stages[stage] if stage else c


def measured(c: ConfigDict) -> ConfigDict:
  """The same tasks measure every stage, and all have one seed: a teacher's prompts are its own."""
  c.init_from = ''
  c.rl.eval_environments = (*DOMAINS, AGENT)
  return c


def reasoning_rl():
  """Section 3.2: four domains in equal parts, GRPO with IcePop."""
  c = measured(nano_reasoning_rl.get_config())
  c.rl.environments = DOMAINS
  return c


def agent_rl():
  """Section 4.1's objective and advantage on an agent's tasks; synchronous, unlike the paper's."""
  c = measured(nano_reasoning_rl.get_config())
  c.rl.environments = (AGENT,)
  c.rl.advantage = 'group_mean'
  c.rl.policy.objective = 'double_sided'
  c.rl.per = 'token'
  c.train.steps = 30
  c.eval.every = 15
  return c


def distill():
  """Section 3.5: group size 1; prompts of all domains, in equal parts (the paper gives no ratios)."""
  c = measured(nano_distill.get_config())
  c.rl.teachers = ConfigDict(dict.fromkeys(DOMAINS, 'stage:reasoning_rl'))
  c.rl.teachers[AGENT] = 'stage:agent_rl'
  return c
