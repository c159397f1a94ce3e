"""What reinforcement learning adds to configs/base.py."""

from ml_collections import ConfigDict

from configs.base import base


def rl_base() -> ConfigDict:
  """All sections of an RL run. See the comments for units."""
  c = base()
  c.stage = 'reasoning_rl'
  c.rl = ConfigDict()
  c.rl.environments = ('math', 'tool', 'lookup', 'code')  # See glm5_jax/envs/catalogue.py.
  c.rl.groups = 16  # Tasks an update, dealt to the environments in turn.
  c.rl.group_size = 8  # Episodes of each task.
  c.rl.eval_tasks = 64  # Held-out tasks of each environment.
  c.rl.advantage = 'group_normalised'  # Eq. 1; or group_mean (section 4.1).
  c.rl.per = 'sequence'  # What counts the same: every sequence (eq. 1), or every token.
  c.rl.seq_len = 320  # Tokens of a row of packed episodes.
  c.rl.micro_rows = 8  # Rows computed at a time.

  c.rl.policy = ConfigDict()  # See PolicyConfig in glm5_jax/losses/policy.py.
  c.rl.policy.objective = 'icepop'
  c.rl.policy.eps_low = 0.2
  c.rl.policy.eps_high = 0.28
  c.rl.policy.beta = 2.0
  c.rl.policy.rho_max = 2.0

  c.rl.episode = ConfigDict()
  c.rl.episode.max_tokens = 320  # Of an episode, everything included.
  c.rl.episode.max_turn_tokens = 64
  c.rl.episode.max_turns = 4
  c.rl.episode.temperature = 1.0  # The paper is silent.

  c.rl.engine = ConfigDict()  # See EngineConfig in glm5_jax/infer/programs.py.
  c.rl.engine.page_size = 16
  c.rl.engine.pages = 2561
  c.rl.engine.max_sequences = 128
  c.rl.engine.max_step_tokens = 1024
  c.rl.engine.prefill_buckets = (64,)
  c.rl.engine.batch_buckets = (16, 128)
  c.rl.engine.page_buckets = (20,)

  # Our choices: the paper names neither optimizer nor learning rate of RL; public GLM-5 recipes use Adam.
  c.optim.name = 'adamw'
  c.optim.peak_lr = 2e-4
  c.optim.end_lr = 2e-4
  c.optim.warmup_steps = 0
  c.optim.weight_decay = 0.0
  c.optim.b2 = 0.99
  c.optim.clip_norm = 1.0
  return c
