"""What the benchmark of old rollouts compares: V-trace without a critic, and which policy is the old one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import off_policy
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.rl import batch
from glm5_jax.rl.learner import Learner, make_policy_step
from glm5_jax.rl.rollout import Trajectory
from tests import tiny
from tests.rl import tiny_run
from tests.rl.tiny_run import CONFIG


def _rows(rng, lengths, prompt=3):
  """Packed trajectories: a prompt, then tokens that were sampled with random log-probabilities."""
  played = []
  for i, n in enumerate(lengths):
    sampled = [False] * prompt + [True] * (n - prompt)
    logprobs = [-float(rng.random()) * 3 if s else 0.0 for s in sampled]
    ids = rng.integers(0, 200, n).tolist()
    played.append(
      Trajectory('math', i, 0, ids, sampled, logprobs, [0 if s else -1 for s in sampled])
    )
  values = rng.standard_normal(len(lengths)).tolist()
  return batch.pack(played, values, 32, 2, 0), values


def test_vtrace_is_the_advantage_times_the_later_ratios():
  """A_t = (r - mean) times the product of min(1, ratio) over the later tokens; one at the last."""
  rng = np.random.default_rng(0)
  rows, _ = _rows(rng, [9, 14, 6, 20, 11])
  now = rows.rollout + 0.5 * rng.standard_normal(rows.rollout.shape).astype(np.float32)
  found = np.asarray(off_policy.vtrace(jax.tree.map(jnp.asarray, rows), jnp.asarray(now)))
  expected = np.zeros_like(found)
  for r in range(len(rows.tokens)):
    for segment in range(1, rows.segment_ids[r].max() + 1):
      at = np.flatnonzero((rows.segment_ids[r] == segment) & rows.mask[r])
      product = 1.0
      for t in at[::-1]:
        expected[r, t] = rows.advantages[r, t] * product
        product *= min(1.0, float(np.exp(now[r, t] - rows.rollout[r, t])))
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_old_policy_of_ppo_may_be_that_of_the_rollout():
  """Clipped against the policy before the update nothing is masked; against the rollout, what left it."""
  rng = np.random.default_rng(1)
  params = tiny.random_params(CONFIG)
  rows, _ = _rows(rng, [9, 14, 20])
  filled, sgd = jnp.int32(len(rows.tokens) // 2), optax.sgd(1.0)
  learner = Learner(PolicyConfig('ppo'), per='token', micro_rows=2)
  before, rollout = (
    make_policy_step(CONFIG, dataclasses.replace(learner, old=old), sgd)(
      tiny_run.state(params, sgd), rows, filled
    )[1]
    for old in ('policy', 'rollout')
  )
  assert before['masked'] == 0
  assert rollout['masked'] > 0.2
  np.testing.assert_allclose(before['ratio'], rollout['ratio'], rtol=1e-6)


def test_every_method_has_its_own_rule():
  assert (
    len({m.policy.objective for m in off_policy.METHODS.values()}) == len(off_policy.METHODS) == 6
  )
  assert all(
    m.policy.eps_low == 0.2 and m.policy.eps_high == 0.28 for m in off_policy.METHODS.values()
  )
