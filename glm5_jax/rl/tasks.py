"""Which tasks a step of training plays, and which ones measure it."""

from collections.abc import Sequence

from glm5_jax.envs.protocol import Environment, sample
from glm5_jax.rl.rollout import Job


def jobs_of_step(
  environments: Sequence[Environment], step: int, groups: int, size: int, seed: int
) -> list[Job]:
  """`groups` tasks, dealt to the environments in turn, `size` episodes of each; a function of the step."""
  jobs = []
  for number in range(step * groups, (step + 1) * groups):
    index, which = divmod(number, len(environments))
    env = environments[which]
    task = sample(env, index, held_out=False, seed=seed)
    jobs += [Job(env, task, index, member) for member in range(size)]
  return jobs


def held_out_jobs(environments: Sequence[Environment], count: int, seed: int) -> list[Job]:
  """`count` held-out tasks of each environment."""
  return [
    Job(env, sample(env, i, held_out=True, seed=seed), i)
    for env in environments
    for i in range(count)
  ]
