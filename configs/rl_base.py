"""What reinforcement learning, and playing tasks at all, adds to configs/base.py."""

from ml_collections import ConfigDict

from configs.base import base


def play_section() -> ConfigDict:
  """An `rl` section with how episodes are played and on which held-out tasks a model is measured."""
  c = ConfigDict()
  # Section 3.2: mathematics, science, code and reasoning with tools in equal parts. There is also
  # 'lookup', an agent's task; see glm5_jax/envs/catalogue.py.
  c.environments = ('math', 'science', 'code', 'tool')
  c.eval_environments = ()  # Measured on; by default `environments`.
  c.eval_tasks = 64  # Held-out tasks of each.

  c.episode = ConfigDict()
  c.episode.max_tokens = 320  # Of an episode, everything included.
  c.episode.max_turn_tokens = 64
  c.episode.max_turns = 4
  c.episode.temperature = 1.0  # The paper is silent.

  c.engine = ConfigDict()  # See EngineConfig in glm5_jax/infer/programs.py.
  c.engine.page_size = 16
  c.engine.pages = 2561
  c.engine.max_sequences = 128
  c.engine.max_step_tokens = 1024
  c.engine.prefill_buckets = (64,)
  c.engine.batch_buckets = (16, 128)
  c.engine.page_buckets = (20,)
  return c


def rl_base() -> ConfigDict:
  """All sections of an RL run. See the comments for units."""
  c = base()
  c.stage = 'reasoning_rl'  # Or distill, where teachers say what is good (section 3.5).
  c.rl = play_section()
  c.rl.groups = 16  # Tasks an update, dealt to the environments in turn.
  c.rl.group_size = 8  # Episodes of each task.
  c.rl.advantage = 'group_normalised'  # Eq. 1; group_mean (section 4.1); teacher (eq. 2).
  c.rl.teachers = ConfigDict()  # For the last: environment -> folder of a run, or stage:NAME.
  c.rl.per = 'sequence'  # What counts the same: every sequence (eq. 1), or every token.
  c.rl.seq_len = 320  # Tokens of a row of packed episodes.
  c.rl.micro_rows = 8  # Rows computed at a time.

  c.rl.policy = ConfigDict()  # See PolicyConfig in glm5_jax/losses/policy.py.
  c.rl.policy.objective = 'icepop'
  c.rl.policy.eps_low = 0.2
  c.rl.policy.eps_high = 0.28
  c.rl.policy.beta = 2.0
  c.rl.policy.rho_max = 2.0

  # Our choices: the paper names neither optimizer nor learning rate of RL; public GLM-5 recipes use Adam.
  c.optim.name = 'adamw'
  c.optim.peak_lr = 2e-4
  c.optim.end_lr = 2e-4
  c.optim.warmup_steps = 0
  c.optim.weight_decay = 0.0
  c.optim.b2 = 0.99
  c.optim.clip_norm = 1.0
  return c
