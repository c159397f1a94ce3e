"""Muon and Muon Split against a float64 reference, Optax's Muon, and their defining properties."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from benchmarks import optimizer_cost
from glm5_jax import config as configs
from glm5_jax.convert.hf_map import flatten
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim import muon, muon_split
from glm5_jax.optim.build import build, by_rules
from glm5_jax.optim.rules import ADAMW_RULES, MUON_RULES, MUON_SPLIT_RULES, TABLES
from glm5_jax.optim.schedules import make_schedule
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Objective, make_train_step
from tests import tiny

# One parameter of each kind, no two dimensions equal: layers 2, then D 20, Q 12, L 9, N 3, H 7, E 4.
SHAPES = {
  'moe': {'block0': {
    'attn': {
      'w_dq': (2, 20, 12), 'w_uq': (2, 12, 3, 7), 'w_uk': (2, 9, 3, 5), 'w_uv': (2, 9, 3, 11),
      'w_o': (2, 3, 11, 20), 'indexer': {'w_q': (2, 12, 2, 6)},
    },
    'moe': {'experts': {'w_up': (2, 4, 20, 8), 'w_down': (2, 4, 8, 20)}},
  }},
  'mtp': {'w_proj': (1, 40, 20)},
}  # fmt: skip
# How the matrices of each lie in the array, apart from the leading axis: for the oracle, as numpy
# indices of a head or expert, and for Optax, as (reduction axes, output axes).
SPLIT = {
  'w_dq': (None, 1, 2), 'w_uq': (2, 1, 3), 'w_uk': (2, 1, 3), 'w_uv': (2, 1, 3),
  'w_o': (None, (1, 2), 3), 'w_q': (None, 1, (2, 3)), 'w_up': (1, 2, 3), 'w_down': (1, 2, 3),
  'w_proj': (None, 1, 2),
}  # fmt: skip


def _draw(shapes, seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(scale * rng.standard_normal(s), jnp.float32),
    shapes,
    is_leaf=lambda s: isinstance(s, tuple),
  )


def _run(tx, params, gradients):
  """The updates of every step."""
  update = tiny.fast_jit(tx.update)
  state, out = tx.init(params), []
  for g in gradients:
    updates, state = update(g, state, params)
    out.append(updates)
  return out


# --- The oracle: float64, matrix by matrix, in the words of arXiv 2502.16982 ---


def _orthogonalize(m):
  x = m / np.sqrt((m**2).sum())
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
  return 0.2 * np.sqrt(max(m.shape)) * x


def _by_matrix(name, m, split):
  """`_orthogonalize` on every matrix of one layer's array; heads by themselves if `split`."""
  if name in ('w_uq', 'w_uk', 'w_uv') and split:
    return np.stack([_orthogonalize(m[:, n]) for n in range(m.shape[1])], axis=1)
  if name in ('w_up', 'w_down'):
    return np.stack([_orthogonalize(e) for e in m])
  rows = m.shape[0] * m.shape[1] if name == 'w_o' else m.shape[0]
  return _orthogonalize(m.reshape(rows, -1)).reshape(m.shape)


def _oracle(name, gradients, weight, lr, decay, nesterov, split):
  """Updates of one parameter over the steps."""
  mu, out = np.zeros(weight.shape), []
  for t, g in enumerate((np.asarray(g, np.float64) for g in gradients), 1):
    mu = 0.95 * mu + 0.05 * g
    direction = mu
    if nesterov:  # With the bias of either average removed, as in NAdam.
      direction = 0.95 * mu / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
    layers = [_by_matrix(name, layer, split) for layer in direction]
    out.append(-lr * (np.stack(layers) + decay * np.asarray(weight, np.float64)))
  return out


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize('name', ['muon_split', 'muon'])
def test_float64_reference(name, nesterov):
  params = _draw(SHAPES, 0)
  gradients = [_draw(SHAPES, seed, 10.0**-seed) for seed in (1, 2, 3)]
  tx = by_rules(TABLES[name], 0.5, weight_decay=0.1, nesterov=nesterov)
  got = [flatten(u) for u in _run(tx, params, gradients)]
  weights, gradients = flatten(params), [flatten(g) for g in gradients]
  for path, weight in weights.items():
    leaf = path.rpartition('/')[2]
    steps = [g[path] for g in gradients]
    want = _oracle(leaf, steps, weight, 0.5, 0.1, nesterov, name == 'muon_split')
    for step, reference in enumerate(want):
      tiny.close_relative(f'{name} {path} step {step}', got[step][path], reference, 3e-6)


@pytest.mark.parametrize('nesterov', [True, False])
def test_equals_optax_with_heads_as_a_batch_axis(nesterov):
  """Over three steps, weight decay and learning rate included."""
  params, gradients = _draw(SHAPES, 0), [_draw(SHAPES, seed) for seed in (1, 2, 3)]

  def numbers(path, _):
    _, rows, cols = SPLIT[path[-1].key]
    return optax.contrib.MuonDimensionNumbers(rows, cols)

  theirs = optax.contrib.muon(
    0.5, weight_decay=0.1, consistent_rms=0.2, nesterov=nesterov,
    muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(numbers, params),
  )  # fmt: skip
  ours = muon_split(0.5, nesterov=nesterov)
  for step, (got, want) in enumerate(
    zip(_run(ours, params, gradients), _run(theirs, params, gradients), strict=True)
  ):
    for path, reference in flatten(want).items():
      tiny.close(f'optax {path} step {step}', flatten(got)[path], reference, 1e-6)


def test_one_learning_rate_for_the_rest_by_adamw():
  params = {'embed': jnp.full((3, 4), 2.0), 'lm_head': jnp.ones((4, 3)), 'final_norm': jnp.ones(4)}
  gradient = _draw({'embed': (3, 4), 'lm_head': (4, 3), 'final_norm': (4,)}, 1)
  (got,) = _run(muon_split(0.5, b1=0.8, b2=0.9), params, [gradient])
  for name, decay in (('embed', 0.1), ('lm_head', 0.1), ('final_norm', 0.0)):
    # Adam's first step is the sign of the gradient.
    want = -0.5 * (np.sign(gradient[name]) + decay * np.asarray(params[name]))
    tiny.close(name, got[name], want, 1e-5)


# --- Properties ---


def _polynomial(s):
  for _ in range(5):
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
  return s


def test_singular_values_of_every_head():
  """They are the fifth iterate of the polynomial, and in its band where they were above 1/100."""
  shapes = {'attn': {'w_uk': (2, 24, 3, 16)}}
  gradient = _draw(shapes, 1)
  tx = muon_split(1.0, weight_decay=0.0)
  (update,) = _run(tx, _draw(shapes, 0), [gradient])
  heads = np.moveaxis(-np.asarray(update['attn']['w_uk'], np.float64), 2, 1).reshape(-1, 24, 16)
  matrices = np.moveaxis(np.asarray(gradient['attn']['w_uk'], np.float64), 2, 1).reshape(
    heads.shape
  )
  got = np.linalg.svd(heads / (0.2 * np.sqrt(24)), compute_uv=False)
  before = np.linalg.svd(matrices, compute_uv=False)
  before /= np.sqrt((before**2).sum(1, keepdims=True))
  assert (before > 0.01).sum() > 90
  tiny.close('singular values', np.sort(got), np.sort(_polynomial(before)), 1e-5)
  print(f'[range] {got[before > 0.01].min():.3f} to {got[before > 0.01].max():.3f}')
  inside = _polynomial(before) > 0
  assert inside.all() and got.min() > 0.68 and got.max() < 1.14
  rms = np.sqrt((heads**2).mean((1, 2)))
  assert rms.min() > 0.68 * 0.2 and rms.max() < 1.14 * 0.2


def test_the_band_of_the_docstring():
  s = np.exp(np.linspace(np.log(1e-9), 0, 1_000_001))
  p = _polynomial(s)
  assert p[s > 0.0015].min() > 0.679 and p.max() < 1.21 and p[s > 0.01].max() < 1.14
  assert (p / s).max() < 485


@pytest.mark.parametrize('name, free', [('muon_split', True), ('muon', False)])
def test_scale_of_one_head_leaves_the_others_alone(name, free):
  shapes = {'attn': {'w_uq': (1, 12, 3, 7)}}
  params, gradient = _draw(shapes, 0), _draw(shapes, 1)
  scaled = {'attn': {'w_uq': gradient['attn']['w_uq'].at[:, :, 1].multiply(1000.0)}}
  tx = by_rules(TABLES[name], 1.0)
  before, after = (np.asarray(_run(tx, params, [g])[0]['attn']['w_uq']) for g in (gradient, scaled))
  difference = np.abs(before - after).max((0, 1, 3))  # Of each head.
  print(f'[max] {name}: by head {difference}')
  if free:  # The scaled head: its own normalisation takes the scale away.
    assert difference.max() < 1e-5 and difference[[0, 2]].max() < 1e-6
  else:
    assert difference[[0, 2]].min() > 0.1


def test_one_row_of_the_table_is_one_experiment():
  """W_O by head instead of whole."""
  shapes = {'attn': {'w_o': (1, 3, 7, 20)}}
  gradient = _draw(shapes, 1)
  tx = by_rules(
    MUON_SPLIT_RULES | {'attn/w_o': 'NHD->N,H,D'}, 1.0, weight_decay=0.0, nesterov=False
  )
  (update,) = _run(tx, _draw(shapes, 0), [gradient])
  heads = np.asarray(gradient['attn']['w_o'], np.float64)[0]
  want = -np.stack([_orthogonalize(m) for m in heads])
  tiny.close('w_o by head', update['attn']['w_o'][0], want, 1e-5)


def test_zero_and_tiny_gradients():
  params = _draw(SHAPES, 0)
  zero = jax.tree.map(jnp.zeros_like, params)
  (update,) = _run(muon_split(0.5, weight_decay=0.0), params, [zero])
  assert all(not u.any() for u in jax.tree.leaves(update))
  (update,) = _run(muon_split(0.5), params, [jax.tree.map(lambda p: 1e-30 * p, params)])
  assert all(np.isfinite(u).all() for u in jax.tree.leaves(update))


def test_weight_decay_is_decoupled():
  """It does not enter the momentum: after two steps the updates differ by -lr * decay * weight."""
  params, gradients = _draw(SHAPES, 0), [_draw(SHAPES, 1), _draw(SHAPES, 2)]
  with_decay, without = (
    _run(muon_split(0.5, weight_decay=d), params, gradients)[1] for d in (0.1, 0.0)
  )
  for path, weight in flatten(params).items():
    difference = np.asarray(flatten(with_decay)[path]) - np.asarray(flatten(without)[path])
    tiny.close(path, difference, -0.5 * 0.1 * np.asarray(weight), 1e-6)


@pytest.mark.parametrize('dtype, allowed', [('float32', 2e-6), ('bfloat16', 0.035)])
def test_rounding_of_newton_schulz(dtype, allowed):
  """Five steps of bfloat16's 0.4 % give 3 %; the singular values stay in the band."""
  run, errors = jax.jit(muon.newton_schulz, static_argnames='dtype'), []
  for shape in ((6, 64, 192), (2, 128, 128), (1, 96, 512)):
    x = np.random.default_rng(0).standard_normal(shape)
    exact = np.stack([_orthogonalize(m) for m in x]) / (0.2 * np.sqrt(shape[2]))
    got = run(jnp.asarray(x, dtype), dtype=dtype)
    assert got.dtype == dtype
    got = np.asarray(got, np.float64)
    errors.append(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    s = np.linalg.svd(got, compute_uv=False)
    print(f'[error] {dtype} {shape}: {errors[-1]:.1e} relative, singular values to {s.max():.3f}')
    assert s.max() < 1.21
    if shape[1] < shape[2]:  # Square Gaussian matrices have singular values near 0.
      assert s.min() > 0.67 and s.max() < 1.15
  assert max(errors) < allowed
  # An option that does nothing would pass too.
  assert dtype == 'float32' or min(errors) > 1e-3


def test_chunks_and_their_padding_change_nothing():
  params, gradient = _draw(SHAPES, 0), _draw(SHAPES, 1)
  whole = _run(muon_split(0.5), params, [gradient])[0]
  for chunk in (1, 3 * 20 * 8):  # One matrix at a time; 16 + 16 expert matrices by threes.
    chunked = _run(muon_split(0.5, ns_chunk=chunk), params, [gradient])[0]
    for path, want in flatten(whole).items():
      tiny.close(f'{path} in chunks', flatten(chunked)[path], want, 1e-6)


def test_state_survives_a_round_trip_under_jit():
  params, gradients = _draw(SHAPES, 0), [_draw(SHAPES, 1), _draw(SHAPES, 2)]
  tx = muon_split(make_schedule('cosine', peak_lr=0.5, end_lr=0.1, warmup_steps=1, steps=4))
  update = tiny.fast_jit(tx.update)
  want = _run(tx, params, gradients)[1]
  _, state = update(gradients[0], tiny.fast_jit(tx.init)(params), params)
  leaves, structure = jax.tree.flatten(state)
  stored = [np.asarray(x) for x in leaves]
  assert sum(x.size for x in stored) < 1.01 * sum(p.size for p in jax.tree.leaves(params)) + 10
  got, state = update(gradients[1], jax.tree.unflatten(structure, stored), params)
  assert jax.tree.structure(state) == structure
  for path, reference in flatten(want).items():
    np.testing.assert_array_equal(flatten(got)[path], reference)


def test_trains_a_tiny_model():
  config = tiny.config(num_hidden_layers=1, first_k_dense_replace=0)
  schedule = make_schedule('constant', peak_lr=0.02, end_lr=0.0, warmup_steps=0, steps=10)
  params = tiny.random_params(config, std=0.1)
  before = jax.tree.map(np.asarray, params)
  tx = muon_split(schedule)
  step = make_train_step(config, Objective(mtp_steps=0, router_bias_rate=0.0), tx, schedule)
  tokens = jnp.asarray(tiny.tokens(config, 2, 17))
  batch = {
    'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'weights': jnp.ones((2, 16)),
    'segment_ids': jnp.ones((2, 16), jnp.int32),
    'positions': jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (2, 16)),
  }  # fmt: skip
  state, losses = TrainState.create(params, tx, 0), []
  for _ in range(8):
    state, metrics = step(state, batch)
    losses.append(float(metrics['ce']))
  print(f'[loss] {losses[0]:.3f} to {losses[-1]:.3f}')
  assert losses[-1] < losses[0] - 1 and int(state.skipped) == 0
  after = flatten(jax.tree.map(np.asarray, state.params))
  unmoved = {path for path, x in flatten(before).items() if (x == after[path]).all()}
  # No MTP step ran: its norms and embedding have no gradient, its matrices only decay.
  assert {p for p in unmoved if not p.startswith('mtp')} == {'moe/block0/moe/router/bias'}


# --- Cost ---


def test_flops_in_closed_form():
  params = abstract_params(configs.glm5())
  got = muon.newton_schulz_flops(params, MUON_SPLIT_RULES)

  def cost(count, m, n):  # Five times X X^T, A A and B X.
    return count * 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)

  # From Table 10: 76 MoE layers with the MTP layer's, of 256 experts and a shared one; 79 in all.
  want = cost(76 * 257 * 3, 2048, 6144) + cost(3 * 3, 6144, 12288)
  want += 79 * (cost(64, 256, 2048) + cost(64, 192, 512) + cost(64, 256, 512))
  want += 79 * (cost(1, 2048, 6144) + cost(1, 576, 6144) + cost(1, 6144, 64 * 256))
  want += 79 * (cost(1, 2048, 32 * 128) + cost(1, 128, 6144) + cost(1, 32, 6144))
  want += 76 * cost(1, 256, 6144) + cost(1, 6144, 2 * 6144)
  assert got == want
  assert muon.newton_schulz_flops(params, ADAMW_RULES) == 0
  assert muon.newton_schulz_flops(params, MUON_RULES) > got


def test_share_at_744b():
  """At GLM-4.5's 64M tokens a step Newton-Schulz is a five-hundredth of the work."""
  share = optimizer_cost.flop_share(configs.glm5(), MUON_SPLIT_RULES, tokens=64_000_000)
  print(f'[share] {share:.3%}')
  assert 0.0015 < share < 0.0025
  # All but the attention's share is 1 / (1 + tokens * 6 * active / fixed): four times for a fourth.
  quarter = optimizer_cost.flop_share(configs.glm5(), MUON_SPLIT_RULES, tokens=16_000_000)
  np.testing.assert_allclose(quarter / (1 - quarter), 4 * share / (1 - share), rtol=1e-3)
  assert optimizer_cost.flop_share(configs.glm5(), ADAMW_RULES, tokens=64_000_000) == 0


# --- Config ---

OPTIM = {
  'name': 'muon_split', 'schedule': 'constant', 'peak_lr': 0.5, 'end_lr': 0.0, 'warmup_steps': 0,
  'b1': 0.9, 'b2': 0.95, 'eps': 1e-8, 'weight_decay': 0.1, 'clip_norm': 0.0, 'momentum': 0.95,
  'nesterov': True, 'ns_dtype': 'float32', 'ns_chunk': 1 << 18,
}  # fmt: skip


@pytest.mark.parametrize('key, value', [('momentum', 0.5), ('nesterov', False),
                                        ('ns_dtype', 'bfloat16'), ('weight_decay', 0.0)])  # fmt: skip
def test_the_config_reaches_the_optimizer(key, value):
  shapes = {'attn': {'w_dq': (1, 12, 8)}}
  params, gradients = _draw(shapes, 0), [_draw(shapes, 1), _draw(shapes, 2)]
  default, changed = (
    _run(build(OPTIM | extra, steps=4)[0], params, gradients)[1]['attn']['w_dq']
    for extra in ({}, {key: value})
  )
  want = _run(muon_split(0.5, **{key: value}), params, gradients)[1]['attn']['w_dq']
  tiny.close(key, changed, want, 1e-7)
  assert np.abs(default - changed).max() > 1e-3


def test_bad_configs():
  with pytest.raises(
    ValueError, match=r"unknown optimizer 'muno', known are \['adamw', 'muon', 'mu"
  ):
    build(OPTIM | {'name': 'muno'}, steps=4)
  with pytest.raises(ValueError, match=r"ns_dtype must be one of .* found 'fp8'"):
    build(OPTIM | {'ns_dtype': 'fp8'}, steps=4)
