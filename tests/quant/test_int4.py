"""INT4: the rounding against numpy, and that training, export and a second rounding agree bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.convert import load_hf, save_hf
from glm5_jax.convert.storage import CheckpointError
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim.rules import path_name
from glm5_jax.quant import checkpoint, int4
from glm5_jax.quant.int4 import Int4, Quantised
from glm5_jax.quant.training import quantised
from tests import tiny
from tests.simulated import run_on_devices

# Inputs of every expert divide into groups of 32.
CONFIG = tiny.config(hidden_size=64, moe_intermediate_size=32, num_nextn_predict_layers=1)
PROPERTY = settings(deadline=None, max_examples=30)


def oracle(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """q, scale and value of [inputs, outputs], group by group in plain loops; scales as bfloat16."""
  q, value = np.zeros(w.shape, np.int64), np.zeros(w.shape)
  scales = np.zeros((len(w) // group, w.shape[1]))
  for o in range(w.shape[1]):
    for g in range(len(w) // group):
      part = w[g * group : (g + 1) * group, o]
      exact = max(np.float32(np.abs(part).max()) / np.float32(7), np.float32(1e-5))
      scale = float(ml_dtypes.bfloat16(exact))
      steps = np.rint(part.astype(np.float32) / np.float32(scale))
      q[g * group : (g + 1) * group, o] = np.clip(steps, -7, 7)
      scales[g, o] = scale
      value[g * group : (g + 1) * group, o] = q[g * group : (g + 1) * group, o] * scale
  return q, scales, value


@pytest.mark.parametrize('group', int4.GROUPS)
def test_the_rounding(group):
  rng = np.random.default_rng(0)
  w = rng.standard_normal((256, 5)).astype(np.float32) * 10.0 ** rng.integers(-6, 2, (1, 5))
  w[:group, 0] = 0.0
  w = w.astype(np.float32)
  found = int4.quantise(jnp.asarray(w), (0,), group)
  q, scale, value = oracle(w, group)
  np.testing.assert_array_equal(np.asarray(found.q, np.int64), q)
  np.testing.assert_array_equal(np.asarray(found.scale, np.float64), scale)
  back = np.asarray(int4.dequantise(found, (0,), group), np.float64)
  np.testing.assert_array_equal(back, value)  # Exact: 11 bits are enough.
  # No weight is off by more than half a step, but for the rounding of the scale.
  step = np.repeat(scale, group, axis=0)
  assert (np.abs(back - w) <= 0.53 * step).all()
  assert np.abs(q).max() == 7 and scale.min() == float(ml_dtypes.bfloat16(1e-5))


def _weights(data, shape):
  seed, exponent = data.draw(st.integers(0, 2**31)), data.draw(st.integers(-20, 20))
  rng = np.random.default_rng(seed)
  return (rng.standard_normal(shape) * 2.0**exponent).astype(np.float32)


@PROPERTY
@given(st.data())
def test_a_second_rounding_changes_nothing(data):
  once = int4.rounded(jnp.asarray(_weights(data, (96, 3))), (0,), 32)
  np.testing.assert_array_equal(int4.rounded(once, (0,), 32), once)


@PROPERTY
@given(st.data())
def test_every_layout_has_the_same_numbers(data):
  """Stacked, transposed, with inputs over two axes: only which weights share a scale counts."""
  w = _weights(data, (64, 6))
  expected = np.asarray(int4.rounded(jnp.asarray(w), (0,), 32))
  np.testing.assert_array_equal(int4.rounded(jnp.asarray(w.T), (1,), 32).T, expected)
  stack = jnp.stack([jnp.asarray(w), jnp.asarray(-w)])
  np.testing.assert_array_equal(int4.rounded(stack, (1,), 32)[0], expected)
  split = int4.rounded(jnp.asarray(w.reshape(4, 16, 6)), (0, 1), 32)
  np.testing.assert_array_equal(split.reshape(64, 6), expected)
  eager = int4.quantise.__wrapped__(jnp.asarray(w), (0,), 32)
  np.testing.assert_array_equal(int4.quantise(jnp.asarray(w), (0,), 32).q, eager.q)


def _sharded():
  """On a mesh, with the inputs split over devices, the numbers and the sharding stay."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from glm5_jax import sharding
  from glm5_jax.quant import int4

  mesh = sharding.make_mesh({'expert': 2, 'fsdp': 2, 'tensor': 2})
  w = np.random.default_rng(0).standard_normal((3, 4, 128, 64)).astype(np.float32)
  for name in ('w_up', 'w_down'):
    spec = sharding.param_spec(f'moe/block0/moe/experts/{name}', 4)
    with jax.set_mesh(mesh):
      x = jax.device_put(w, jax.NamedSharding(mesh, spec))
      found = jax.jit(lambda x: int4.rounded(x, (2,), 32))(x)
      assert found.sharding.spec == x.sharding.spec and len(set(spec)) == 4
    np.testing.assert_array_equal(found, int4.rounded(jnp.asarray(w), (2,), 32))


def test_sharded_weights():
  run_on_devices(_sharded)


@PROPERTY
@given(st.data())
def test_packing(data):
  rows = data.draw(st.lists(st.lists(st.integers(-8, 7), min_size=8, max_size=8), min_size=1))
  q = np.array(rows, np.int8)
  packed = int4.pack(q)
  assert packed.shape == (len(q), 4) and packed.dtype == np.uint8
  np.testing.assert_array_equal(int4.unpack(packed), q)
  assert int(packed[0, 0]) == (int(q[0, 0]) % 16) + 16 * (int(q[0, 1]) % 16)


# --- Training ---


def _covered(params, spec=Int4()):
  return {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)
          if spec.covers(path_name(p))}  # fmt: skip


def _steps(tx, params, gradient, count):
  state, out = tx.init(params), []
  for i in range(count):
    updates, state = tx.update(gradient(params, i), state, params)
    params = optax.apply_updates(params, updates)
    out.append((params, state))
  return out


def _gradient(params, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), params)


def test_the_parameters_are_the_rounded_weights_at_every_step():
  """Bit for bit, over steps small enough to stay on a value and large enough to leave it."""
  params = tiny.random_params(CONFIG)
  spec = Int4()
  for rate in (1e-4, 1e-2, 0.5):
    warmed_up = optax.sgd(optax.linear_schedule(0.0, rate, 2))
    found = _steps(quantised(warmed_up, spec), params, _gradient, 6)
    changed = 0
    for (before, _), (now, state) in zip([(params, None), *found], found, strict=False):
      for path, x in _covered(now).items():
        master = _covered(state.masters)[path]
        expected = int4.rounded(master, spec.axes(path, master.shape), 32)
        np.testing.assert_array_equal(x, expected, err_msg=path)
        changed += int(np.sum(x != _covered(before)[path]))
    assert changed > 0


def test_the_gradient_goes_straight_through():
  """The weights before rounding move as plain SGD moves them, and everything else is untouched by it."""
  params = tiny.random_params(CONFIG)
  plain = _steps(optax.sgd(0.01, momentum=0.9), params, _gradient, 4)[-1][0]
  now, state = _steps(quantised(optax.sgd(0.01, momentum=0.9), Int4()), params, _gradient, 4)[-1]
  covered = _covered(params)
  assert len(covered) == 6  # Gate, up and down, of the MoE stack and of the MTP layer.
  for path, x in jax.tree_util.tree_leaves_with_path(plain):
    name = path_name(path)
    got = _covered(state.masters)[name] if name in covered else _flat(now)[name]
    np.testing.assert_array_equal(got, x, err_msg=name)


def _flat(params):
  return {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def test_weight_decay_is_of_the_weights_before_rounding():
  params = tiny.random_params(CONFIG)
  zero = lambda params, seed: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
  tx = quantised(optax.chain(optax.add_decayed_weights(0.5), optax.scale(-1.0)), Int4())
  _, state = _steps(tx, params, zero, 3)[-1]
  for name, x in _covered(state.masters).items():
    np.testing.assert_allclose(x, 0.125 * _flat(params)[name], rtol=1e-6)


def test_a_small_problem_is_learnt_in_int4():
  """Least squares: the rounded weights' loss falls to near what rounding the solution costs."""
  rng = np.random.default_rng(0)
  x, solution = rng.standard_normal((512, 64)), rng.standard_normal((64, 8))
  x, y = jnp.float32(x), jnp.float32(x @ solution)

  def loss(params):
    return jnp.mean((x @ params['experts']['w_up'][0] - y) ** 2)

  params = {'experts': {'w_up': jnp.zeros((1, 64, 8))}}
  found = _steps(quantised(optax.adam(0.03), Int4()), params, lambda p, _: jax.grad(loss)(p), 300)
  best = {'experts': {'w_up': int4.rounded(jnp.float32(solution)[None], (1,), 32)}}
  assert loss(found[-1][0]) < 2 * loss(best) < 0.2 * loss(params)


@pytest.mark.parametrize(
  'spec, said',
  [
    (dict(group=16), 'optim.int4_group=16 is none of [32, 128]'),
    (dict(parameters='('), 'is no pattern'),
    (dict(parameters='experts/w_gates'), 'matches no parameter'),
    (dict(parameters='embed'), 'names embed, which is no matrix of a layer'),
    (dict(group=128), 'has 32 inputs, which groups of optim.int4_group=128 do not divide'),
  ],
)
def test_impossible_requests(spec, said):
  with pytest.raises(ValueError) as error:
    Int4(**spec).check(abstract_params(CONFIG))
  assert said in str(error.value)


def test_the_sft_stages_key(monkeypatch, tmp_path):
  """--config.optim.int4_group reaches the optimizer, and what is impossible is an error of the config."""
  from configs import nano_sft
  from glm5_jax.train.prepare import ConfigError, prepare

  config = nano_sft.get_config()
  params = abstract_params(prepare(config).model)
  assert not hasattr(jax.eval_shape(prepare(config).optimizer[0].init, params), 'masters')
  config.optim.int4_group = 32
  state = jax.eval_shape(prepare(config).optimizer[0].init, params)
  assert _covered(state.masters).keys() == _flat(state.masters).keys() == _covered(params).keys()
  config.optim.int4_parameters = 'router/bias'
  with pytest.raises(ConfigError, match='no matrix of a layer'):
    prepare(config)


# --- Offline ---


@pytest.fixture
def trained():
  """Parameters after a few steps of quantisation-aware training, and the state."""
  return _steps(quantised(optax.sgd(0.02), Int4()), tiny.random_params(CONFIG), _gradient, 3)[-1]


@pytest.mark.parametrize('shard', [1 << 30, 60_000])
def test_export_holds_what_training_computed_with(trained, tmp_path, shard):
  """From the trained parameters and from the weights before rounding alike, bit for bit."""
  params, state = trained
  masters = jax.tree_util.tree_map_with_path(
    lambda path, x: _covered(state.masters).get(path_name(path), x), params
  )
  for name, tree in (('rounded', params), ('masters', masters)):
    save_hf(tmp_path / name, CONFIG, tree, max_shard_bytes=shard)
    (tmp_path / name / 'tokenizer.json').write_text('{}')
    count = checkpoint.quantise_checkpoint(tmp_path / name, tmp_path / f'{name}4')
    assert count == 3 * CONFIG.n_routed_experts * 2
    checkpoint.restore_checkpoint(tmp_path / f'{name}4', tmp_path / f'{name}32')
    _, found = load_hf(tmp_path / f'{name}32')
    for path, x in _flat(found).items():
      np.testing.assert_array_equal(x, _flat(params)[path], err_msg=f'{name}: {path}')
    assert (tmp_path / f'{name}4' / 'tokenizer.json').exists()
  sizes = [
    sum(f.stat().st_size for f in (tmp_path / n).glob('*.safetensors'))
    for n in ('rounded', 'rounded4')
  ]
  experts = sum(x.size for x in _covered(params).values())
  saved = sizes[0] - sizes[1]
  # 4 bytes a weight become half a byte and a sixteenth; the headers grow a little.
  assert 0.8 < saved / (experts * (4 - 0.5 - 2 / 32)) <= 1.0


def test_what_cannot_be_read_or_written(trained, tmp_path):
  source, target = tmp_path / 'source', tmp_path / 'target'
  save_hf(source, CONFIG, trained[0])
  checkpoint.quantise_checkpoint(source, target)
  with pytest.raises(FileExistsError, match='name a new directory'):
    checkpoint.quantise_checkpoint(source, target)
  with pytest.raises(CheckpointError, match='is quantised already'):
    checkpoint.quantise_checkpoint(target, tmp_path / 'again')
  with pytest.raises(CheckpointError, match='was not written by quantise_checkpoint'):
    checkpoint.restore_checkpoint(source, tmp_path / 'again')
  with pytest.raises(ValueError, match='quantise all of it or nothing'):
    checkpoint.quantise_checkpoint(source, tmp_path / 'again', Int4(parameters='attn/w_uk'))
  assert not (tmp_path / 'again').exists()
  assert sorted(p.name for p in tmp_path.iterdir()) == ['source', 'target']


def test_the_command(trained, tmp_path, capsys):
  save_hf(tmp_path / 'a', CONFIG, trained[0])
  assert checkpoint.main([str(tmp_path / 'a'), str(tmp_path / 'b'), '--group=32']) == 0
  assert checkpoint.main([str(tmp_path / 'b'), str(tmp_path / 'c'), '--restore']) == 0
  assert '48 matrices' in capsys.readouterr().out
  assert checkpoint.main([str(tmp_path / 'a'), str(tmp_path / 'd'), '--group=128']) == 1
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1 and 'do not divide' in err


def test_stored_numbers_are_those_of_the_matrix(trained, tmp_path):
  """A matrix [out, in] of the file, unpacked by hand, is the transpose of ours."""
  from safetensors.numpy import load_file

  params, _ = trained
  save_hf(tmp_path / 'a', CONFIG, params)
  checkpoint.quantise_checkpoint(tmp_path / 'a', tmp_path / 'b')
  tensors = load_file(tmp_path / 'b' / 'model.safetensors')
  name = 'model.layers.1.mlp.experts.3.down_proj.weight'
  packed, scale = tensors[f'{name}_packed'], tensors[f'{name}_scale']
  ours = np.asarray(params['moe']['block0']['moe']['experts']['w_down'][0, 3])
  assert packed.shape == (64, 16) and scale.shape == (64, 1) and name not in tensors
  low, high = (packed & 15).astype(np.int64), (packed >> 4).astype(np.int64)
  q = np.stack([low, high], axis=-1).reshape(64, 32)
  q[q > 7] -= 16
  np.testing.assert_array_equal((q * np.float64(scale)).T, ours)
  assert isinstance(int4.quantise(jnp.asarray(ours), (0,), 32), Quantised)
