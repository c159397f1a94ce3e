"""Which rule each parameter gets, what one update does, and the schedules' shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import config as configs
from glm5_jax.convert.hf_map import flatten
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim.build import build
from glm5_jax.optim.rules import ADAMW_RULES, label_params
from glm5_jax.optim.schedules import make_schedule

OPTIM = {
  'name': 'adamw', 'schedule': 'constant', 'peak_lr': 0.1, 'end_lr': 0.0, 'warmup_steps': 0,
  'b1': 0.9, 'b2': 0.95, 'eps': 1e-8, 'weight_decay': 0.5, 'clip_norm': 1.0,
}  # fmt: skip


def test_every_parameter_of_the_model_has_its_rule():
  labels = flatten(label_params(abstract_params(configs.nano()), ADAMW_RULES))
  shapes = flatten(abstract_params(configs.nano()))
  frozen = {p for p, rule in labels.items() if rule == 'frozen'}
  spared = {p for p, rule in labels.items() if rule == 'adamw_no_decay'}
  assert {p.rpartition('/')[2] for p in frozen} == {'bias'}
  assert all('router' in p for p in frozen)
  # What is not decayed is a vector; what is, a matrix (stacked arrays have one more axis).
  stacked = {p: len(s.shape) - ('/' in p) for p, s in shapes.items()}
  assert all(stacked[p] == 1 for p in spared)
  assert all(stacked[p] >= 2 for p in set(labels) - spared - frozen)


def _one_update(gradient: float, **changes):
  params = {
    'embed': jnp.full((2, 3), 2.0),
    'final_norm': jnp.full(3, 2.0),
    'moe': {'block0': {'moe': {'router': {'w': jnp.ones((1, 3, 2)), 'bias': jnp.ones((1, 2))}}}},
  }
  tx, _ = build(OPTIM | changes, steps=10)
  gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), params)
  return tx.update(gradients, tx.init(params), params)[0], gradients


def test_decay_only_matrices_and_never_the_router_bias():
  updates, _ = _one_update(0.0)
  np.testing.assert_allclose(updates['embed'], -0.1 * 0.5 * 2.0, rtol=1e-6)
  assert not updates['final_norm'].any()
  router = updates['moe']['block0']['moe']['router']
  np.testing.assert_allclose(router['w'], -0.1 * 0.5, rtol=1e-6)
  updates, _ = _one_update(1.0)
  assert not updates['moe']['block0']['moe']['router']['bias'].any()


def test_the_global_norm_is_clipped():
  """Adam divides by the gradient's size, so an eps far above it shows the clipped gradient itself."""
  eps = 1e6
  updates, gradients = _one_update(100.0, weight_decay=0.0, eps=eps)
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
  np.testing.assert_allclose(updates['embed'], -0.1 * 100.0 / norm / eps, rtol=1e-4)
  updates, _ = _one_update(100.0, weight_decay=0.0, eps=eps, clip_norm=0.0)
  np.testing.assert_allclose(updates['embed'], -0.1 * 100.0 / eps, rtol=1e-3)


@pytest.mark.parametrize(
  'name, middle', [('cosine', 0.55e-3), ('linear', 0.55e-3), ('constant', 1e-3)]
)
def test_schedules(name, middle):
  lr = make_schedule(name, peak_lr=1e-3, end_lr=1e-4, warmup_steps=10, steps=110)
  end = 1e-3 if name == 'constant' else 1e-4
  expected = {0: 0.0, 5: 0.5e-3, 10: 1e-3, 60: middle, 110: end, 500: end}
  np.testing.assert_allclose([lr(s) for s in expected], list(expected.values()), rtol=1e-5)
  if name == 'cosine':  # A quarter of the way is above the straight line.
    np.testing.assert_allclose(lr(35), 1e-4 + 0.9e-3 * (1 + np.cos(np.pi / 4)) / 2, rtol=1e-5)


def test_unknown_names_and_impossible_lengths():
  with pytest.raises(ValueError, match="unknown schedule 'cosin'"):
    make_schedule('cosin', peak_lr=1.0, end_lr=0.0, warmup_steps=0, steps=10)
  with pytest.raises(ValueError, match='warmup_steps=10 must be'):
    make_schedule('cosine', peak_lr=1.0, end_lr=0.0, warmup_steps=10, steps=10)
  with pytest.raises(ValueError, match="unknown optimizer 'adam'"):
    build(OPTIM | {'name': 'adam'}, steps=10)
