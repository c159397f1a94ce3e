"""Blank infilling and fill-in-the-middle as objectives of a run, from config to report."""

import json

import pytest

from glm5_jax.train import loop


def infilling(config):
  config.data.objective = 'infilling'
  config.data.packing = 'best_fit'
  config.data.infilling.span_prob = 0.5
  config.train.mtp_steps = 0
  config.train.steps = 20
  return config


@pytest.mark.parametrize(
  ('section', 'key', 'value', 'message'),
  [
    ('train', 'mtp_steps', 2, r"data\.objective='infilling' .* set train\.mtp_steps=0"),
    ('data', 'packing', 'concat', "set packing to 'best_fit' or 'first_fit'"),
    ('data', 'fim_rate', 0.5, "fim_rate is for objective 'next_token'"),
    ('data', 'objective', 'infilled', "DataConfig.objective is 'infilled'"),
  ],
)
def test_impossible_runs_are_refused(tiny_config, tmp_path, section, key, value, message):
  config = infilling(tiny_config)
  config[section][key] = value
  with pytest.raises(loop.ConfigError, match=message):
    loop.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_run_learns_to_fill_in(tiny_config, tmp_path):
  """20 steps: the loss falls on hidden tokens, and on the held-out text that is generated whole."""
  config = infilling(tiny_config)
  config.eval.every = 5
  assert loop.train(config, tmp_path / 'run') == 0
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  losses = [row['loss'] for row in rows if 'loss' in row]
  held_out = [row['eval/loss'] for row in rows if 'eval/loss' in row]
  print(f'[loss] training {losses[0]:.3f} to {losses[-1]:.3f}, held out {held_out}')
  assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
  assert len(held_out) == 4 and held_out[-1] < held_out[0] - 0.05
  assert (tmp_path / 'run' / 'report.md').exists()
