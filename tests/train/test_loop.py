"""The loop on a tiny model: what it compiles, when it stops, what it leaves behind."""

import gzip
import json
import re
import shutil

import flax
import jax
import jax.numpy as jnp
import matplotlib.image
import pytest

from glm5_jax import data
from glm5_jax.train import loop, metrics
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.state import TrainState


def _rows(folder):
  return [r for r in metrics.read(folder / 'metrics.jsonl') if 'loss' in r]


def test_the_folder_of_a_finished_run(finished):
  names = {p.name for p in finished.iterdir() if not p.name.startswith('.')}
  assert names == {
    'config.json', 'metrics.jsonl', 'tensorboard', 'checkpoints', 'plots', 'report.md',
    'tokenizer.json', 'result.json',
  }  # fmt: skip
  rows = _rows(finished)
  assert [r['step'] for r in rows] == list(range(1, 41))
  assert rows[-1]['ce'] < rows[0]['ce'] - 0.5
  expected = {
    'loss', 'ce', 'mtp_loss_1', 'mtp_loss_2', 'indexer_kl', 'balance_loss', 'accuracy', 'grad_norm',
    'lr', 'tokens', 'tokens_per_second', 'flops_per_second', 'load_max_over_mean', 'router_entropy',
    'skipped', 'load', 'time', 'seconds',
  }  # fmt: skip
  assert expected <= rows[0].keys()
  evaluations = [r for r in metrics.read(finished / 'metrics.jsonl') if 'eval/loss' in r]
  assert [r['step'] for r in evaluations] == [10, 20, 30, 40]
  assert 0 < evaluations[-1]['eval/indexer_recall'] <= 1
  assert json.loads((finished / 'config.json').read_text())['model']['hidden_size'] == 32


def test_the_report_of_a_finished_run(finished, tiny_config):
  text = (finished / 'report.md').read_text()
  assert text.startswith('# nano, pretrain: 40 of 40 steps\n') and 'Stopped early' not in text
  held_out = data.held_out_texts(data.load_corpus(data.DataConfig.from_mapping(tiny_config.data)))
  assert f'{len(held_out)} documents of {sum(map(len, held_out)):,} bytes' in text
  gzip9 = 8 * sum(len(gzip.compress(t, 9, mtime=0)) for t in held_out) / sum(map(len, held_out))
  assert f'| `gzip -9`, file by file | {gzip9:.3f} |' in text
  assert re.search(r'\| this model \| [1-9]\.\d{3} \|', text)
  assert '```\nthe command\n```' in text and '⟦' in text and 'jax ' in text
  images = re.findall(r'\]\((plots/[a-z_]+\.png)\)', text)
  assert {p.split('/')[1] for p in images} == {
    'loss.png', 'optimizer.png', 'expert_load.png', 'indexer_recall.png', 'selection.png',
  }  # fmt: skip
  for image in images:
    picture = matplotlib.image.imread(finished / image)
    assert picture.shape[0] > 200 and picture.shape[1] > 500 and picture.std() > 0.05
  assert not [p for p in finished.rglob('.*') if p.name != '.lock']


def test_nothing_is_compiled_after_step_2(tiny_config, tmp_path, monkeypatch):
  compiled, per_step = [], {}

  def listener(event, _, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(kwargs.get('fun_name'))

  original = metrics.StepRecord.add

  def add(self, step, *args):
    original(self, step, *args)
    per_step[step] = len(compiled)

  monkeypatch.setattr(metrics.StepRecord, 'add', add)
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    tiny_config.eval.every = tiny_config.checkpoint.every = 40
    assert loop.train(tiny_config, tmp_path / 'run') == 0
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert per_step[2] > 0, 'the listener saw no compilation at all'
  assert per_step[40] == per_step[2], compiled[per_step[2] :]


def test_gradient_accumulation_is_the_same_training(tiny_config, tmp_path, finished):
  tiny_config.train.grad_accum = 2
  tiny_config.train.max_minutes = 1e-6
  loop.train(tiny_config, tmp_path / 'run')
  accumulated, whole = _rows(tmp_path / 'run')[0], _rows(finished)[0]
  for key in ('loss', 'ce', 'mtp_loss_2', 'grad_norm', 'load_max_over_mean'):
    assert accumulated[key] == pytest.approx(whole[key], rel=2e-5), key


def test_stops_when_the_time_is_over(tiny_config, tmp_path, capsys):
  tiny_config.train.max_minutes = 1e-6
  run = tmp_path / 'run'
  assert loop.train(tiny_config, run) == 0
  assert Checkpoints(run / 'checkpoints').steps() == [1]
  report = (run / 'report.md').read_text()
  assert '**Stopped early** at step 1 of 40: train.max_minutes=1e-06 are over' in report
  assert 'bits per byte' in report
  assert 'resume from step 1' in capsys.readouterr().out


def test_stops_when_numbers_are_not_finite(tiny_config, finished, tmp_path, capsys):
  run = tmp_path / 'run'
  shutil.copytree(finished, run)
  checkpoints = Checkpoints(run / 'checkpoints', keep_last=9)
  for step in (20, 30, 40):
    shutil.rmtree(run / 'checkpoints' / str(step))
  # Step 10 again, with one parameter broken.
  parts = loop.prepare(tiny_config)
  model, tx = parts.model, parts.optimizer[0]

  def init():
    return TrainState.create(loop.init_params(model, jax.random.key(0)), tx, 0)

  restored = checkpoints.restore(jax.eval_shape(init))
  flat = flax.traverse_util.flatten_dict(restored.state.params)
  flat[('final_norm',)] = flat[('final_norm',)].at[0].set(jnp.nan)
  params = flax.traverse_util.unflatten_dict(flat)
  checkpoints.save(
    11, restored.state.replace(params=params, step=restored.state.step + 1), data=restored.data
  )
  checkpoints.close()

  tiny_config.train.max_consecutive_skips = 5
  config_file = run / 'config.json'
  saved = json.loads(config_file.read_text())
  saved['train']['max_consecutive_skips'] = 5
  config_file.write_text(json.dumps(saved))
  assert loop.train(tiny_config, run) == 1
  out = capsys.readouterr().out
  assert out.count('not finite, skipped') >= 5
  assert 'stopped at step' in out and 'resume from step 11' in out
  assert Checkpoints(run / 'checkpoints').steps() == [10, 11]
  rows = [r for r in _rows(run) if r['step'] > 11]
  assert 5 <= len(rows) <= 6 and rows[-1]['skipped'] == len(rows) and rows[-1]['loss'] is None
  assert 'steps in a row were not finite' in (run / 'report.md').read_text()


def test_a_finished_run_goes_on_when_asked_for_more_steps(tiny_config, finished, tmp_path, capsys):
  run = tmp_path / 'run'
  shutil.copytree(finished, run)
  tiny_config.eval.every = 20
  tiny_config.checkpoint.keep_last = 1
  assert loop.train(tiny_config, run) == 0
  assert 'from step 40' in capsys.readouterr().out
  assert len(_rows(run)) == 40


def test_a_vocabulary_that_does_not_fit(tiny_config, tmp_path):
  tiny_config.model.vocab_size = 100
  with pytest.raises(loop.ConfigError, match='set --config.model.vocab_size=292 or more'):
    loop.train(tiny_config, tmp_path / 'run')


@pytest.mark.parametrize(
  'key, value, message',
  [
    ('model.size', 'nanno', "did you mean 'nano'"),
    ('train.steps', 0, 'train.steps=0 must be at least 1'),
    ('train.grad_accum', 3, 'must divide data.batch_size=2'),
    ('optim.warmup_steps', 99, 'warmup_steps=99'),
    ('model.n_routed_experts', 1, 'exceeds n_routed_experts'),
    ('data.packing', 'tetris', 'packing'),
  ],
)
def test_impossible_values_are_found_before_anything_is_written(
  tiny_config, tmp_path, key, value, message
):
  section, name = key.split('.')
  tiny_config[section][name] = value
  with pytest.raises(loop.ConfigError, match=message):
    loop.train(tiny_config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
