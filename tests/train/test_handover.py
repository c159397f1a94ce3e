"""A stage that starts from another run: parameters and tokenizer bit for bit, everything else anew."""

import json
import pathlib
import shutil

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from glm5_jax.modules.model import init_params
from glm5_jax.train import checkpoint, loop, metrics
from glm5_jax.train.checkpoint import CheckpointError, Checkpoints
from glm5_jax.train.handover import Handover

# Orbax does not close the arrays of a failed read.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


def saved(folder: pathlib.Path, item: str, step: int | None = None) -> dict[str, np.ndarray]:
  """The arrays of a run's checkpoint (by default the newest), by path."""
  step = step or Checkpoints(folder / 'checkpoints').steps()[-1]
  with ocp.StandardCheckpointer() as reader:
    tree = reader.restore(folder / 'checkpoints' / str(step) / item)
  return flax.traverse_util.flatten_dict(tree, sep='/')


def of_indexer(name: str) -> bool:
  return '/indexer/' in name


@pytest.fixture
def next_config(tiny_config, finished):
  """One step of a stage after `finished`, too small to change a parameter in float32."""
  tiny_config.init_from = str(finished)
  tiny_config.stage = 'midtrain'
  tiny_config.train.steps = 1
  tiny_config.train.router_bias_rate = 0.0
  tiny_config.optim.peak_lr = tiny_config.optim.end_lr = 1e-30
  tiny_config.optim.warmup_steps = 0
  tiny_config.optim.schedule = 'constant'  # So that the number of steps is not in the program.
  return tiny_config


def test_parameters_come_over_bit_for_bit_and_the_optimizer_is_new(
  next_config, finished, tmp_path, capsys
):
  run = tmp_path / 'run'
  next_config.model.rope_theta = 1e6
  next_config.data.seq_len = 48
  assert loop.train(next_config, run) == 0
  assert f'starting from step 40 of {finished}' in capsys.readouterr().out
  before, after = saved(finished, 'params'), saved(run, 'params')
  assert before.keys() == after.keys()
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)
  # What counts steps counts this run's own, and the curve begins at 1.
  counts = {k: v for k, v in saved(run, 'train').items() if k.endswith('count') or k == 'step'}
  assert counts and {int(v) for v in counts.values()} == {1}, counts
  assert {int(v) for k, v in saved(finished, 'train').items() if k in counts} == {40}
  (row,) = [r for r in metrics.read(run / 'metrics.jsonl') if 'loss' in r]
  assert row['step'] == 1
  # A new first moment is (1 - b1) of the one clipped gradient it has seen.
  moments = [v for k, v in saved(run, 'train').items() if '.mu.' in k]
  norm = np.sqrt(sum(np.sum(np.square(v, dtype=np.float64)) for v in moments))
  assert len(moments) > 20 and norm == pytest.approx(0.1 * min(1.0, row['grad_norm']), rel=1e-4)
  assert (run / 'tokenizer.json').read_bytes() == (finished / 'tokenizer.json').read_bytes()


def test_a_warmup_run_changes_indexers_only(next_config, finished, tmp_path):
  """The whole way: config, data, steps, checkpoint."""
  run = tmp_path / 'run'
  next_config.stage = 'dsa_warmup'
  next_config.optim.peak_lr, next_config.optim.end_lr = 5e-3, 2e-4
  next_config.train.router_bias_rate = 0.001
  next_config.train.steps = 10
  next_config.optim.schedule = 'linear'
  assert loop.train(next_config, run) == 0
  before, after = saved(finished, 'params'), saved(run, 'params')
  for name, value in before.items():
    assert (after[name] != value).any() == of_indexer(name), name
  rows = metrics.read(run / 'metrics.jsonl')
  kl = [r['indexer_kl'] for r in rows if 'loss' in r]
  assert len(kl) == 10 and all('ce' not in r for r in rows)
  recall = [r['eval/indexer_recall'] for r in rows if 'eval/loss' in r]
  assert 0 < recall[-1] <= 1
  text = (run / 'report.md').read_text()
  assert '| trained | the indexers only |' in text and '| selected keys | all |' in text


def _without_indexers(folder: pathlib.Path, finished: pathlib.Path) -> pathlib.Path:
  """The finished run as one whose checkpoint has no indexer."""

  @flax.struct.dataclass
  class State:
    step: jax.Array
    params: dict

  folder.mkdir()
  for name in ('config.json', 'tokenizer.json'):
    shutil.copy(finished / name, folder)
  kept = {k: v for k, v in saved(finished, 'params').items() if not of_indexer(k)}
  checkpoints = Checkpoints(folder / 'checkpoints')
  params = flax.traverse_util.unflatten_dict(kept, sep='/')
  checkpoints.save(7, State(jnp.int32(7), jax.tree.map(jnp.asarray, params)))
  checkpoints.close()
  return folder


def test_indexers_that_the_checkpoint_lacks_are_initialised(next_config, finished, tmp_path):
  next_config.init_from = str(_without_indexers(tmp_path / 'dense', finished))
  next_config.seed = 3
  assert loop.train(next_config, tmp_path / 'run') == 0
  new = init_params(loop.prepare(next_config).model, jax.random.key(3))
  new = flax.traverse_util.flatten_dict(new, sep='/')
  before, after = saved(finished, 'params'), saved(tmp_path / 'run', 'params')
  for name, value in after.items():
    if of_indexer(name):
      np.testing.assert_allclose(value, new[name], rtol=1e-6, atol=1e-20, err_msg=name)
      assert name.endswith(('scale', 'bias')) or value.std() > 0.01
    else:
      np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_another_indexer_is_initialised_where_it_does_not_fit(next_config, finished, tmp_path):
  next_config.model.index_n_heads = 3
  next_config.stage = 'dsa_warmup'
  assert loop.train(next_config, tmp_path / 'run') == 0
  before, after = saved(finished, 'params'), saved(tmp_path / 'run', 'params')
  for name, value in after.items():
    if name.endswith(('indexer/w_q', 'indexer/w_w')):
      assert 3 in value.shape and 0.01 < value.std() < 0.03, name
    else:
      np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_a_begun_stage_needs_the_run_before_no_longer(next_config, finished, tmp_path):
  earlier = tmp_path / 'earlier'
  shutil.copytree(finished, earlier)
  next_config.init_from = str(earlier)
  assert loop.train(next_config, tmp_path / 'run') == 0
  shutil.rmtree(earlier)
  next_config.train.steps = 2
  assert loop.train(next_config, tmp_path / 'run') == 0
  assert Checkpoints(tmp_path / 'run' / 'checkpoints').steps()[-1] == 2


def test_a_damaged_newest_checkpoint_is_passed_over_and_left_alone(
  next_config, finished, tmp_path, monkeypatch
):
  warnings: list[str] = []
  monkeypatch.setattr(checkpoint.logging, 'warning', lambda text, *a: warnings.append(text % a))
  earlier = tmp_path / 'earlier'
  shutil.copytree(finished, earlier)
  for data in (earlier / 'checkpoints' / '40' / 'params').rglob('d/*'):
    data.write_bytes(data.read_bytes()[:-100])
  files = sorted(p for p in earlier.rglob('*'))
  model = loop.prepare(next_config).model
  step, params = Handover(str(earlier), model).params(
    jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
  )
  assert step == 30 and str(earlier / 'checkpoints' / '40') in '\n'.join(warnings)
  want = saved(finished, 'params', 30)
  for name, value in flax.traverse_util.flatten_dict(params, sep='/').items():
    np.testing.assert_array_equal(value, want[name])
  assert sorted(p for p in earlier.rglob('*')) == files


# --- One clear error ---


def _error(config, run) -> str:
  with pytest.raises(CheckpointError) as error:
    loop.train(config, run)
  assert '\n' not in str(error.value) and not run.exists()
  return str(error.value)


def test_another_model_names_the_differences(next_config, finished, tmp_path):
  next_config.model.hidden_size = 48
  next_config.model.n_routed_experts = 8
  next_config.model.rope_theta = 5e5  # May change.
  message = _error(next_config, tmp_path / 'run')
  assert f'init_from={finished} is another model: hidden_size was 32, is 48' in message
  assert 'n_routed_experts was 4, is 8' in message and 'rope_theta' not in message


def test_another_tokenizer_is_an_error(next_config, finished):
  """The ids of the embedding's rows mean what the first run's tokenizer says."""
  start = Handover(str(finished), loop.prepare(next_config).model)
  wanted = next_config.data.tokenizer.to_dict()
  assert start.tokenizer(wanted).path == str(finished / 'tokenizer.json')
  with pytest.raises(CheckpointError) as error:
    start.tokenizer(wanted | {'kind': 'bpe', 'vocab_size': 290})
  message = str(error.value)
  assert "data.tokenizer.kind was 'byte', is 'bpe'" in message and '\n' not in message
  assert 'Set data.tokenizer as that run has it' in message


def test_no_run_there(next_config, finished, tmp_path):
  run, folder = tmp_path / 'run', tmp_path / 'earlier'
  next_config.init_from = str(folder)
  assert 'does not exist; name the folder of a run' in _error(next_config, run)
  folder.mkdir()
  assert 'is not the folder of a run' in _error(next_config, run)
  shutil.copy(finished / 'config.json', folder)
  assert 'has no checkpoint yet; run that stage first' in _error(next_config, run)
  (folder / 'config.json').write_text('{"model": ')
  assert 'is not the folder of a run' in _error(next_config, run)
  (folder / 'config.json').write_text(json.dumps([1]))
  assert 'is not the folder of a run' in _error(next_config, run)
