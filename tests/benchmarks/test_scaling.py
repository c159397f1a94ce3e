"""How cost grows: the cases are possible, and the tables say what the compiles found."""

import json
import math
import pathlib

import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import cases, figures, tables
from experiments import run
from glm5_jax.aot.chips import CHIPS
from glm5_jax.sharding import AXES
from glm5_jax.train import placement
from glm5_jax.train.prepare import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
EVERY = cases.models() | cases.layers()


def _result(chips, tokens, flops=1e12, hbm=1e9, sent=1e8):
  """Of a step; work is that of a chip."""
  return {
    'chips': chips, 'tokens': tokens, 'argument_bytes_per_chip': 1e9, 'peak_bytes_per_chip': 9e9,
    'flops_per_chip': flops, 'model_flops': flops * chips / 2, 'bytes_accessed_per_chip': hbm,
    'collectives_per_chip': {'all-gather': {'sent_bytes': sent}},
  }  # fmt: skip


def _parts(case):
  arguments = [a for a in case.command()[3:] if a.startswith('--config')]
  config, _ = run.parse(['run', *arguments, '--workdir=none'])
  return config, prepare(config)


@pytest.mark.parametrize('name', EVERY)
def test_a_case_divides(name, monkeypatch):
  """Its config is possible, its sizes divide over its devices, which its topology has."""
  monkeypatch.chdir(ROOT)
  config, parts = _parts(EVERY[name])
  sizes = [config.mesh[axis] for axis in AXES]
  assert math.prod(sizes) in (1, cases.shape_chips(EVERY[name].topology))
  mesh = AbstractMesh(tuple(sizes), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
  placement.check(mesh, parts.model, parts.objective, parts.plan)
  tokens = parts.plan.rows * parts.plan.seq_len
  if name in cases.layers():
    assert tokens == cases.STEP_TOKENS and len(parts.model.blocks) == 1
    assert parts.objective.stage.indexers == name.startswith('sparse')
  else:
    assert f' {math.prod(sizes)} chips' in name
    assert tokens / parts.plan.micro_batches / math.prod(sizes) == (
      1024 if 'over 4' in name else 4096
    )


@pytest.mark.parametrize(('name', 'size'), [('1B', 1.0e9), ('30B', 30e9), ('744B', 744e9)])
def test_sizes(name, size, monkeypatch):
  monkeypatch.chdir(ROOT)
  assert math.isclose(tables.parameters(name), size, rel_tol=0.03)


def test_costs_are_of_a_token_and_chip():
  c = tables.cost(_result(chips=4, tokens=4000, flops=2e12, hbm=3e9, sent=5e8))
  assert (c.chips, c.tokens, c.flops, c.model_flops) == (4, 1000, 2e9, 1e9)
  assert (c.hbm, c.sent, c.state, c.peak) == (3e6, 5e5, 1e9, 9e9)
  assert math.isclose(c.seconds.network, 5e5 / 600e9)


def test_network_limit():
  """As measured where weights take 1 GB a micro-batch and a token 1 kB."""
  chip = CHIPS['v5p']

  def at(tokens):
    return tables.cost(_result(1, 1, flops=1e11, sent=1e9 / tokens + 1e3))

  weights, token = tables.shares(at(4096).sent, at(1024).sent, (4096, 1024))
  assert math.isclose(weights, 1e9) and math.isclose(token, 1e3)
  limit = tables.network_limit(at(4096), at(1024), (4096, 1024), chip)
  assert math.isclose(at(limit).seconds.network, at(limit).seconds.compute)
  slow = chip.__class__(1e30, chip.hbm_bytes, chip.hbm_bandwidth, chip.ici_bandwidth)
  assert tables.network_limit(at(4096), at(1024), (4096, 1024), slow) == math.inf


def test_crossover():
  assert math.isclose(tables.crossover([1, 4, 16], [4, 8, 16], [1, 4, 32]), 4 * 4 ** (1 / 2))
  assert tables.crossover([1, 4], [1, 1], [2, 2]) == 1
  assert tables.crossover([1, 4], [3, 3], [2, 2]) == math.inf


def test_formula_is_that_of_a_run(monkeypatch):
  monkeypatch.chdir(ROOT)
  from glm5_jax.aot.step import model_flops

  for kind in ('dense', 'sparse'):
    _, parts = _parts(cases.layer_case(kind, 16384))
    assert math.isclose(model_flops(parts) / cases.STEP_TOKENS, tables.formula(kind, 16384))
  assert tables.formula('dense', 1 << 20) > 7 * tables.formula('sparse', 1 << 20)


def _results():
  """All cases but one, and one that does not fit."""
  found = {
    name: _result(
      int(name.split(', ')[1].split()[0]), 4096 * 64, sent=1e8 + 1e8 * ('over 4' in name)
    )
    for name in cases.models()
  }
  for name in cases.layers():
    kind, length = name.rsplit(', ', 1)
    work = 1 + int(length[:-1]) / (64 if kind == 'dense' else 1024)
    found[name] = _result(1, cases.STEP_TOKENS, work * 1e15, work * 1e12, 0)
  found['dense, 128K'] = {'error': 'does not fit: 99G of 95G'}
  del found['744B, 2048 chips']
  return found


def test_tables():
  text = tables.everything(_results())
  models, layers = (part.splitlines() for part in text.split('\n\n')[:2])
  assert len(models) == 2 + len(cases.models()) - 1
  assert len(layers) == 2 + len(cases.LENGTHS)
  assert '| 744B, rows over 4 | 1,024 | 1.00 | 9.0 |' in text
  assert '| 1,048,576 | (104.11) |' in layers[-1]
  for lines in (models, layers):
    assert len({line.count('|') for line in lines}) == 1
  assert 'sparse below dense by model FLOPs: from 4,' in text
  assert '744B on 1,024 chips: a chip sends' in text


def test_figures(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  figures.save_all(tmp_path, _results())
  for name in ('scaling_models', 'scaling_chips', 'sparse_dense'):
    assert (tmp_path / f'{name}.png').read_bytes()[1:4] == b'PNG'


def test_a_result_is_not_compiled_again(tmp_path, monkeypatch, capsys):
  asked = []

  class Done:
    returncode, stderr = 0, ''
    stdout = 'lines\n' + json.dumps(_result(4, 4096)) + '\n'

  def compile_case(command, **_):
    asked.append(command)
    return Done

  monkeypatch.setattr(scaling.subprocess, 'run', compile_case)
  arguments = ['--only=^nano, 4 ', f'--out={tmp_path}']
  assert scaling.main(arguments) == scaling.main(arguments) == 0
  assert len(asked) == 1 and asked[0][-1] == '--plan'
  assert '| nano | 4 | 1.00 |' in capsys.readouterr().out
  path = tmp_path / 'nano_4_chips.json'
  kept = json.loads(path.read_text())
  assert kept['command'] == asked[0][1:]
  path.write_text(json.dumps(kept | {'command': ['another']}))
  Done.returncode, Done.stderr = 1, 'error: no such thing'
  assert scaling.main(arguments) == 0
  assert '| nano | 4 | no such thing |' in capsys.readouterr().out
  assert scaling.main(arguments) == 0 and len(asked) == 3
  assert scaling.main(['--only=no such case']) == 2


@pytest.mark.tpu
def test_nano_on_four_chips(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  name = 'nano, 4 chips'
  c = tables.cost(scaling.result_of(name, EVERY[name], tmp_path))
  assert c.chips == 4 and c.tokens == cases.ROW * cases.MICRO_BATCHES
  assert c.model_flops < c.flops and c.sent > 0 and c.state < c.peak < 95e9
