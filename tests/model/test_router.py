"""The router against the oracle: sigmoid and softmax, groups, ties, statistics, balancing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.ops import router
from tests import oracle, tiny

route = tiny.fast_jit(router.route, static_argnames='config')


def case(seed=0, tokens=40, **changes):
  config = tiny.config(n_routed_experts=12, num_experts_per_tok=3, **changes)
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((tokens, config.hidden_size)).astype('f4')
  w = rng.standard_normal((config.hidden_size, 12)).astype('f4') * 0.3
  bias = rng.standard_normal(12).astype('f4') * 0.2
  return config, x, w, bias


@pytest.mark.parametrize('scoring_func', ['sigmoid', 'softmax'])
@pytest.mark.parametrize('groups', [(1, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize('normalise', [True, False])
def test_equals_the_oracle(scoring_func, groups, normalise):
  n_group, topk_group = groups
  config, x, w, bias = case(
    scoring_func=scoring_func, n_group=n_group, topk_group=topk_group, norm_topk_prob=normalise
  )
  got = route(x, w, bias, config=config)
  weights = {'gate.weight': w.T.astype('f8'), 'gate.e_score_correction_bias': bias}
  logits, experts, p = oracle.route(weights, config.to_hf(), x.astype('f8'))
  tiny.close('router logits', got.logits, logits, 1e-5)
  np.testing.assert_array_equal(got.experts, experts)
  tiny.close('router weights', got.weights, p, 2e-6)
  if n_group > 1:  # The limit is felt, and kept: no token uses more groups than allowed.
    size = 12 // n_group
    used = [len(set(row)) for row in (np.asarray(got.experts) // size).tolist()]
    assert max(used) <= topk_group
    free = route(x, w, bias, config=config.replace(n_group=1, topk_group=1))
    assert (np.asarray(free.experts) != np.asarray(got.experts)).any()


def test_bias_selects_only():
  """A huge bias decides who computes, not how much it counts; it and the choice get no gradient."""
  config, x, w, _ = case()
  bias = np.zeros(12, 'f4')
  bias[[2, 5, 7]] = 10
  got = route(x, w, bias, config=config)
  assert np.sort(np.asarray(got.experts), 1).tolist() == [[2, 5, 7]] * len(x)
  chosen = np.take_along_axis(oracle.sigmoid(x.astype('f8') @ w), np.asarray(got.experts), 1)
  want = config.routed_scaling_factor * chosen / chosen.sum(1, keepdims=True)
  tiny.close('weights under a bias', got.weights, want, 2e-6)

  def total(w, bias):
    return jnp.sum(router.route(x, w, bias, config).weights * jnp.arange(3.0))

  to_w, to_bias = tiny.fast_jit(jax.grad(total, argnums=(0, 1)))(w, bias)
  assert np.asarray(to_w)[:, [2, 5, 7]].all()
  assert not np.asarray(to_w)[:, [0, 1, 3]].any() and not np.asarray(to_bias).any()


@pytest.mark.parametrize('groups', [(1, 1), (4, 2)])
def test_ties_go_to_the_lowest_expert(groups):
  config, x, w, bias = case(n_group=groups[0], topk_group=groups[1])
  got = route(x, 0 * w, 0 * bias, config=config)
  np.testing.assert_array_equal(got.experts, np.tile([0, 1, 2], (len(x), 1)))
  tiny.close('equal weights', got.weights, np.full((len(x), 3), 2.5 / 3), 1e-6)


def test_negative_choices_still_beat_excluded_groups():
  """Scores below 0 (a strongly negative bias) must not lose to the groups that were left out."""
  config, x, w, bias = case(n_group=4, topk_group=2)
  got = route(x, w, bias - 5, config=config)
  same = route(x, w, bias, config=config)
  np.testing.assert_array_equal(got.experts, same.experts)


def test_bfloat16_activations_are_routed_in_float32():
  config, x, w, bias = case()
  x = jnp.asarray(x, jnp.bfloat16)
  got = route(x, w, bias, config=config)
  assert got.logits.dtype == got.weights.dtype == jnp.float32
  tiny.close('logits of bf16 input', got.logits, np.asarray(x, 'f8') @ w.astype('f8'), 1e-5)


def statistics():
  config, x, w, bias = case()
  valid = np.random.default_rng(3).random(40) < 0.7
  return config, route(x, w, bias, config=config), valid


def test_load_counts_valid_tokens():
  _, routing, valid = statistics()
  counts = np.bincount(np.asarray(routing.experts)[valid].ravel(), minlength=12)
  tiny.close('load', router.load(routing, valid, 12), counts / counts.sum(), 1e-6)
  assert not np.asarray(router.load(routing, np.zeros(40, bool), 12)).any()


def test_balance_loss():
  """sum_e f_e P_e of each row (DeepSeek-V3, eq. 17 to 20), averaged over the rows."""
  config, routing, valid = statistics()
  score = oracle.sigmoid(np.asarray(routing.logits, 'f8')).reshape(2, 20, 12)
  experts, rows = np.asarray(routing.experts).reshape(2, 20, 3), []
  for b in range(2):
    ok = valid.reshape(2, 20)[b]
    f = np.bincount(experts[b][ok].ravel(), minlength=12) * 12 / (3 * ok.sum())
    p = (score[b] / score[b].sum(-1, keepdims=True))[ok].mean(0)
    rows.append((f * p).sum())
  got = router.balance_loss(routing, jnp.asarray(valid), 2, config)
  tiny.close('balance loss', got, np.mean(rows), 1e-6)
  even = routing._replace(
    experts=jnp.arange(120).reshape(40, 3) % 12, scores=jnp.ones_like(routing.scores)
  )
  tiny.close('perfect balance', router.balance_loss(even, valid | True, 2, config), 1.0, 1e-6)


def test_bias_update_moves_towards_balance():
  load = jnp.array([[0.5, 0.25, 0.125, 0.125], [0.25] * 4])
  got = router.updated_bias(jnp.ones((2, 4)), load, 0.01)
  want = [[0.99, 1.0, 1.01, 1.01], [1.0] * 4]
  tiny.close('updated bias', got, want, 1e-7)
