"""The table of compiles: its cases are possible, and it says what they found."""

import json
import math
import pathlib

import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks import aot_table
from experiments import run
from glm5_jax import sharding
from glm5_jax.modules.model import abstract_params
from glm5_jax.rl.prepare import prepare_rl
from glm5_jax.sharding import AXES
from glm5_jax.train import placement
from glm5_jax.train.prepare import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULT = {
  'chips': 1024, 'argument_bytes_per_chip': 8e9, 'temporary_bytes_per_chip': 40e9,
  'peak_bytes_per_chip': 48.4e9, 'hbm_bytes_per_chip': 95e9, 'fits': True,
  'flops_over_model_flops': 1.5, 'zero3_bytes_per_chip': 4e12, 'mfu_overlapped': 0.666,
  'mfu_scheduled': 0.5,
  'collectives_per_chip': {'all-gather': {'sent_bytes': 1e12}, 'all-reduce': {'sent_bytes': 1e12}},
  'roofline_seconds': {'compute': 3.0, 'memory': 2.0, 'network': 1.0, 'exposed': 0.75},
}  # fmt: skip


@pytest.mark.parametrize('name', aot_table.CASES)
def test_a_case_divides(name, monkeypatch):
  """Its config is possible, and its sizes divide over the devices of its topology."""
  monkeypatch.chdir(ROOT)
  case = aot_table.CASES[name]
  arguments = [a for a in case.command()[3:] if a.startswith('--config')]
  config, _ = run.parse(['run', *arguments, '--workdir=none'])
  kind, _, shape = case.topology.partition(':')
  chips = math.prod(map(int, shape.split('x')))
  assert f'{chips} {kind}' in name
  devices = chips * (2 if kind == 'tpu7x' else 1)
  sizes = [config.mesh[axis] for axis in AXES]
  sizes = [devices // -math.prod(sizes) if n == -1 else n for n in sizes]
  assert math.prod(sizes) == devices
  mesh = AbstractMesh(tuple(sizes), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
  if 'rl' in config:
    parts = prepare_rl(config, one_device=False)
    sharding.param_shardings(abstract_params(parts.model), mesh)
    dealt = math.prod(mesh.shape[axis] for axis in sharding.BATCH_AXES)
    assert config.rl.micro_rows % dealt == 0 == config.rl.groups * config.rl.group_size % dealt
    assert config.rl.seq_len % (2 * mesh.shape['context']) == 0
  else:
    parts = prepare(config)
    placement.check(mesh, parts.model, parts.objective, parts.plan)


def test_rows():
  text = aot_table.row('4K', RESULT)
  cells = '4K|1,024|8.0|40.0|48.4|1.50|0.50|3.00|2.00|1.00|0.75|50%|67%'.split('|')
  assert text == f'| {" | ".join(cells)} |'
  assert '| 99.0 of 95: does not fit |' in aot_table.row(
    '4K', RESULT | {'peak_bytes_per_chip': 99e9, 'fits': False}
  )
  lines = aot_table.table({'4K': RESULT, '200K': {'error': 'why'}}).splitlines()
  assert '| 200K | why |' in lines[-1]
  assert len({line.count('|') for line in lines}) == 1


def test_reasons():
  compiler = (
    'error: the compiler refuses: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used'
    ' 120.53G of 95.74G hbm. Exceeded hbm capacity by 24.79G.'
  )
  assert aot_table.reason(f'{compiler}\n\nProgram: 99.0G') == 'does not fit: 120.53G of 95.74G'
  temporaries = (
    'error: the total memory required for HLO temporaries (321.00G) exceeds available HBM (95.74G).'
  )
  assert aot_table.reason(temporaries) == 'does not fit: 321.00G of temporaries, of 95.74G'
  assert aot_table.reason('warning\nerror: no such axis\n') == 'no such axis'
  assert aot_table.reason('') == ''


def test_a_result_is_not_compiled_again(tmp_path, monkeypatch, capsys):
  asked = []

  def compile_case(case, log):
    asked.append(case)
    log.write_text('')
    return RESULT if case.config == 'pretrain.py' else {'error': 'why'}

  monkeypatch.setattr(aot_table, 'compile_case', compile_case)
  arguments = ['--only=^(4K|32K), 1024 v5p$', f'--out={tmp_path}']
  assert aot_table.main(arguments) == 0
  assert [c.config for c in asked] == ['pretrain.py', 'midtrain.py:32k']
  assert aot_table.main(arguments) == 0
  assert [c.config for c in asked[2:]] == ['midtrain.py:32k']  # It failed.
  assert '| 4K, 1024 v5p | 1,024 |' in (tmp_path / 'table.md').read_text()
  assert '| 32K, 1024 v5p | why |' in capsys.readouterr().out
  lines = [json.loads(line) for line in (tmp_path / 'aot.jsonl').read_text().splitlines()]
  assert [line.get('error') for line in lines] == [None, 'why']
  assert lines[0]['command'][-1] == '--plan'
  assert aot_table.main(['--only=no such case']) == 2
