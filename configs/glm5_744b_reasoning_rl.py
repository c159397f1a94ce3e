"""GLM-5's reasoning RL: GRPO with IcePop, 32 tasks of 32 episodes an update.

  python -m experiments.run --config=configs/glm5_744b_reasoning_rl.py --workdir=runs/glm5_744b_reasoning_rl

1,000 updates of 1,024 episodes (our choice of number). Were every episode 16,384 tokens long, these would
be 16.8B tokens and 4.9e21 model FLOPs (train/flops.py) of updates, 14 hours at 40 % of the peak of 512 TPU
v5p chips, and the playing besides. Checked as a config only, never run: rl/loop.py has trainer and engine
in one process, and a model of this size needs machines for either. Numbers without a remark are the
paper's (arXiv 2602.15763, section 3.2), which names no length, temperature, learning rate or number of
updates. Its tasks are not public: the environments are this project's own, in its four domains, and far
too easy.
"""

from configs.base import model
from configs.rl_base import rl_base


def get_config():
  """`python -m experiments.run --config=configs/glm5_744b_reasoning_rl.py --workdir=DIR`."""
  c = rl_base()
  c.stage = 'reasoning_rl'
  c.init_from = 'runs/glm5_744b_sft'
  c.model = model(
    'glm5', index_topk=2048,
    dtype='bfloat16', param_dtype='float32', remat='block',  # Our choice.
  )  # fmt: skip
  c.data.tokenizer.kind = 'file'
  c.data.tokenizer.path = 'data/tokenizer.json'
  c.data.seq_len = 202752  # Not read in RL; the same as before.

  c.rl.environments = ('math', 'science', 'code', 'tool')  # In about equal parts.
  c.rl.groups = 32  # "Batch 32", read as tasks.
  c.rl.group_size = 32
  c.rl.advantage = 'group_normalised'  # Eq. 1, as the next six.
  c.rl.per = 'sequence'
  c.rl.policy.objective = 'icepop'  # Without a KL term.
  c.rl.policy.eps_low = 0.2
  c.rl.policy.eps_high = 0.28
  c.rl.policy.beta = 2.0

  # The model's context (section 3.1); how much of it an episode had in RL is not said.
  c.rl.seq_len = 202752
  c.rl.episode.max_tokens = 202752
  c.rl.episode.max_turn_tokens = (
    131072  # Our choice: what the paper's evaluation allows (appendix B).
  )
  c.rl.episode.max_turns = 64  # Our choice, and all of the rest.
  c.rl.episode.temperature = 1.0
  c.rl.micro_rows = 1
  c.rl.eval_tasks = 64
  c.rl.engine.page_size = 64  # Of public recipes.
  c.rl.engine.pages = 1 << 18  # 16 Mi tokens: 128 sequences of 131,072.
  c.rl.engine.max_sequences = 1024
  c.rl.engine.max_step_tokens = 16384
  c.rl.engine.prefill_buckets = (2048, 8192)
  c.rl.engine.batch_buckets = (64, 256, 1024)
  c.rl.engine.page_buckets = (64, 512, 3168)

  # Public recipes for GLM-5: Adam at a constant 1e-6, betas 0.9 and 0.98, decay 0.1.
  c.optim.name = 'adamw'
  c.optim.schedule = 'constant'
  c.optim.peak_lr = c.optim.end_lr = 1e-6
  c.optim.warmup_steps = 0
  c.optim.b1 = 0.9
  c.optim.b2 = 0.98
  c.optim.weight_decay = 0.1
  c.train.steps = 1000
  c.eval.every = 50
  c.checkpoint.every = 20
  return c
