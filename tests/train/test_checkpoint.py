"""Checkpoints survive damage: whatever file breaks, the state is restored bit for bit or not at all."""

import json
import os
import pathlib
import shutil

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.train.checkpoint import CheckpointError, Checkpoints

# Orbax does not close the arrays of a failed read.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')

_TX = optax.adamw(1e-3)


@flax.struct.dataclass
class _State:
  step: jax.Array
  params: dict
  opt_state: optax.OptState
  rng: jax.Array


def _state(step: int, width: int = 40) -> _State:
  keys = jax.random.split(jax.random.key(step), 4)
  params = {
    'embed': jax.random.normal(keys[0], (50, width)),
    'moe': {'block0': {'w': jax.random.normal(keys[1], (2, width, 8)).astype(jnp.bfloat16)}},
  }
  opt_state = jax.tree.map(
    lambda x: x + jax.random.normal(keys[2], x.shape).astype(x.dtype) + step, _TX.init(params)
  )
  return _State(jnp.asarray(step, jnp.int32), params, opt_state, jax.random.key_data(keys[3]))


def _assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> pathlib.Path:
  """Checkpoints of steps 1 and 2."""
  folder = tmp_path_factory.mktemp('saved') / 'checkpoints'
  checkpoints = Checkpoints(folder)
  for step in (1, 2):
    assert checkpoints.save(step, _state(step), data={'row': step})
  checkpoints.close()
  return folder


def test_round_trip_and_the_newest_wins(saved):
  restored = Checkpoints(saved).restore(jax.eval_shape(lambda: _state(0)))
  assert (restored.step, restored.data) == (2, {'row': 2})
  _assert_same(restored.state, _state(2))


def test_restores_into_the_given_shardings(saved):
  mesh = jax.make_mesh((1,), ('fsdp',), axis_types=(jax.sharding.AxisType.Explicit,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(lambda: _state(0)),
  )
  restored = Checkpoints(saved).restore(like)
  assert {x.sharding for x in jax.tree.leaves(restored.state)} == {sharding}
  _assert_same(restored.state, _state(2))


def test_no_checkpoint_is_none(tmp_path):
  assert Checkpoints(tmp_path / 'absent').restore(jax.eval_shape(lambda: _state(0))) is None
  assert not (tmp_path / 'absent').exists()


def test_a_donated_state_is_saved_as_it_was(tmp_path):
  # The write is asynchronous while the next steps reuse the very buffers.
  bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  state, expected = {}, {}
  state = _state(0)
  checkpoints = Checkpoints(tmp_path, keep_last=9)
  for step in range(1, 5):
    state = bump(state)
    expected[step] = jax.tree.map(lambda x: np.array(x, copy=True), state)
    checkpoints.save(step, state)
    state = bump(bump(state))
  checkpoints.close()
  for step in (4, 3, 2, 1):
    restored = Checkpoints(tmp_path).restore(jax.eval_shape(lambda: _state(0)))
    assert restored.step == step
    _assert_same(restored.state, expected[step])
    shutil.rmtree(tmp_path / str(step))


_DAMAGE = {
  'deleted': lambda path: path.unlink(),
  'truncated': lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
  'garbage': lambda path: path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size)),
  'bit flip': lambda path: path.write_bytes(_flip(path.read_bytes())),
}


def _flip(data: bytes) -> bytes:
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p.relative_to(folder) for p in folder.rglob('*') if p.is_file())


@pytest.mark.parametrize('damage', _DAMAGE)
def test_any_damaged_file_falls_back_loudly_or_does_not_matter(saved, tmp_path, damage, caplog):
  like = jax.eval_shape(lambda: _state(0))
  fell_back = set()
  for i, file in enumerate(_files(saved / '2')):
    folder = tmp_path / str(i)
    shutil.copytree(saved, folder)
    _DAMAGE[damage](folder / '2' / file)
    caplog.clear()
    restored = Checkpoints(folder).restore(like)
    _assert_same(restored.state, _state(restored.step))
    assert restored.data == {'row': restored.step}
    if restored.step == 1:
      fell_back.add(file.as_posix().split('/d/')[0])
      assert str(folder / '2') in caplog.text and 'unusable (' in caplog.text
      assert (folder / 'unusable-2').is_dir() and not (folder / '2').exists()
  # The metadata of this module and the arrays themselves always matter.
  assert {'meta/metadata', 'params/ocdbt.process_0', 'train/ocdbt.process_0'} <= fell_back


def test_a_run_goes_on_after_a_fallback(saved, tmp_path):
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  (folder / '2' / 'meta' / 'metadata').write_text('{}')
  checkpoints = Checkpoints(folder)
  assert checkpoints.restore(jax.eval_shape(lambda: _state(0))).step == 1
  assert checkpoints.save(2, _state(7), data='again')
  checkpoints.close()
  restored = Checkpoints(folder).restore(jax.eval_shape(lambda: _state(0)))
  assert (restored.step, restored.data) == (2, 'again')
  _assert_same(restored.state, _state(7))


def test_none_usable_is_one_error_and_deletes_nothing(saved, tmp_path):
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  for step in ('1', '2'):
    shutil.rmtree(folder / step / 'params')
  before = _files(folder)
  with pytest.raises(CheckpointError, match='none of the 2 checkpoints .* Nothing was deleted'):
    Checkpoints(folder).restore(jax.eval_shape(lambda: _state(0)))
  assert _files(folder) == before


def test_another_model_is_an_error_not_a_fallback(saved):
  before = _files(saved)
  with pytest.raises(CheckpointError) as error:
    Checkpoints(saved).restore(jax.eval_shape(lambda: _state(0, width=48)))
  assert 'params.embed: checkpoint float32[50,40], this run float32[50,48]' in str(error.value)
  like = jax.eval_shape(lambda: _state(0))
  del like.params['moe']
  with pytest.raises(CheckpointError, match=r'params\.moe\.block0\.w: .* this run lacks it'):
    Checkpoints(saved).restore(like)
  assert _files(saved) == before


def test_keeps_the_last_and_the_best(tmp_path):
  losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: float('nan'), 5: 3.0, 6: None, 7: 2.0}
  checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
  for step, loss in losses.items():
    checkpoints.save(step, _state(step), metrics=None if loss is None else {'eval/loss': loss})
  checkpoints.wait()
  assert checkpoints.steps() == [2, 6, 7]
  assert checkpoints.best_value() == 1.0
  assert not checkpoints.save(7, _state(0))
  checkpoints.close()
  assert Checkpoints(tmp_path).best_value() == 1.0


def test_a_damaged_rank_costs_only_the_rank(saved, tmp_path, caplog):
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  (folder / '2' / 'metrics' / 'metrics').write_text('{"eval/lo')
  checkpoints = Checkpoints(folder)
  assert checkpoints.best_value() == float('inf')
  assert str(folder / '2' / 'metrics') in caplog.text
  assert checkpoints.restore(jax.eval_shape(lambda: _state(0))).step == 2
  checkpoints.close()


def test_left_over_temporary_folders_are_ignored_and_removed(saved, tmp_path):
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  shutil.copytree(folder / '2', folder / '3.orbax-checkpoint-tmp')
  checkpoints = Checkpoints(folder)
  assert checkpoints.restore(jax.eval_shape(lambda: _state(0))).step == 2
  checkpoints.save(3, _state(3))
  checkpoints.close()
  assert sorted(p.name for p in folder.iterdir()) == ['2', '3']


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(CheckpointError, match='cannot write checkpoint'):
    Checkpoints(tmp_path / 'file' / 'x').save(1, _state(1))


def test_a_failed_write_is_reported(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, _state(1))
  checkpoints.wait()

  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(pathlib.Path, 'rename', full)
  monkeypatch.setattr(os, 'rename', full)
  monkeypatch.setattr(os, 'replace', full)
  with pytest.raises(CheckpointError, match='No space left on device'):
    checkpoints.save(2, _state(2))
    checkpoints.wait()
  monkeypatch.undo()
  assert Checkpoints(tmp_path).restore(jax.eval_shape(lambda: _state(0))).step == 1


def test_meta_is_plain_json(saved):
  meta = json.loads((saved / '2' / 'meta' / 'metadata').read_text())
  assert meta['step'] == 2 and meta['data'] == {'row': 2}
  assert meta['arrays']['params.embed'].startswith('float32[50,40] ')
