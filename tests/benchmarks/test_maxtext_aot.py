"""MaxText beside ours: the shape it is given, what is read of its program, and the table."""

import json
import pathlib
import sys

import pytest

from benchmarks.maxtext_aot import compare, peer
from glm5_jax.aot import hlo, step

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULT = {
  'argument_bytes_per_chip': 17e9, 'temporary_bytes_per_chip': 40e9, 'peak_bytes_per_chip': 57e9,
  'hbm_bytes_per_chip': 95e9, 'fits': True, 'flops_over_model_flops': 1.4,
  'zero3_bytes_per_chip': 4e12, 'compile_cpu_seconds': 11.6,
  'collectives_per_chip': {
    'all-gather': {'sent_bytes': 3e12}, 'all-reduce': {'sent_bytes': 2e12},
    'reduce-scatter': {'sent_bytes': 1e11}, 'all-to-all': {'sent_bytes': 1e9},
  },
}  # fmt: skip
# A kernel's attributes hold line breaks, as JAX's grouped matmul in MaxText has them.
PROGRAM = """HloModule jit_train_step

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %g = bf16[64,16]{1,0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %gmm.3 = bf16[8,16]{1,0} custom-call(%g, %x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000"}}}
  ROOT %t = (s32[], bf16[8,16]{1,0}) tuple(%i, %gmm.3)
}

%condition (q: (s32[], bf16[8,16])) -> pred[] {
  %q = (s32[], bf16[8,16]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %a = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %w = (s32[], bf16[8,16]{1,0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
PEER = [name for name, entry in compare.ENTRIES.items() if entry.peer is not None]


def test_a_kernel_of_several_lines():
  work = hlo.measure(PROGRAM)
  assert work.flops == 5 * 1000 and work.kernels == {'gmm': 5000.0}
  assert hlo.measure(PROGRAM, filled=0.5).flops == 2500
  gathers = work.collectives['all-gather']
  assert gathers.calls == 5 and gathers.payload == 5 * 64 * 16 * 2
  assert gathers.sent == gathers.payload * 7 / 8


@pytest.mark.parametrize('name', PEER)
def test_both_sides_have_one_shape(name, monkeypatch):
  """What MaxText is given: 4,096 tokens a chip of GLM-5, in one micro-batch."""
  monkeypatch.chdir(ROOT)
  entry = compare.ENTRIES[name]
  parts = compare.prepared(entry.case)
  keys = compare.peer_keys(parts)
  assert keys['per_device_batch_size'] * keys['max_target_length'] == 4096
  assert keys['gradient_accumulation_steps'] == 1
  assert (keys['base_emb_dim'], keys['base_num_decoder_layers']) == (6144, 78)
  assert keys.get('use_indexer') == ('true' if 'DSA' in name else None)
  command = compare.peer_command(entry, parts, 'python', pathlib.Path('out'))
  assert command[:1] == ['python'] and command[2] == '--out=out'
  assert 'compile_topology=v5p-1024' in command and command[
    len(command) - len(entry.peer) :
  ] == list(entry.peer)
  group = name.partition(',')[0]
  ours = [e.case for n, e in compare.ENTRIES.items() if n.startswith(f'{group}, ours')]
  others = [compare.prepared(case) for case in ours]
  assert others and all(step.model_flops(o) == step.model_flops(parts) for o in others)
  assert all(step.zero3_bytes(o) == step.zero3_bytes(parts) for o in others)


def test_shapes_that_maxtext_does_not_have(monkeypatch):
  monkeypatch.chdir(ROOT)
  case = compare.ENTRIES['4K, ours, AdamW'].case
  with_mtp = [c for c in case.changes if 'nextn' not in c and 'mtp' not in c]
  with pytest.raises(ValueError, match='no MTP'):
    compare.peer_keys(compare.prepared(case._replace(changes=tuple(with_mtp))))


def test_a_program_that_is_there_is_read(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  entry = compare.ENTRIES['4K, MaxText, AdamW']
  found = {
    'argument_bytes': 10, 'temporary_bytes': 20, 'peak_bytes': 96e9, 'compile_cpu_seconds': 3.21,
  }  # fmt: skip
  (tmp_path / 'program.json').write_text(json.dumps(found))
  (tmp_path / 'program.txt').write_text(PROGRAM)
  result = compare.read_peer(tmp_path, compare.prepared(entry.case))
  assert result['flops_over_model_flops'] == 5000 * 512 / result['model_flops']
  assert result['tokens'] == 512 * 4096 and not result['fits']
  assert result['collectives_per_chip']['all-gather']['count'] == 5
  # Experts over 8 chips: buffers have room for 8 times an even load.
  divided = compare.read_peer(tmp_path, compare.prepared(entry.case), expert=8)
  assert divided['flops_per_chip'] == 5000 / 8
  assert result['flops_over_model_flops_at_least'] == result['flops_over_model_flops']
  json.dumps(result)


def test_attention_under_an_indexers_mask(tmp_path, monkeypatch):
  """Its kernel's estimate is of the whole square, of which half may be skipped."""
  monkeypatch.chdir(ROOT)
  parts = compare.prepared(compare.ENTRIES['DSA 32K, MaxText, AdamW'].case)
  found = {
    'argument_bytes': 1, 'temporary_bytes': 1, 'peak_bytes': 2, 'compile_cpu_seconds': 1.0,
  }  # fmt: skip
  (tmp_path / 'program.json').write_text(json.dumps(found))
  (tmp_path / 'program.txt').write_text(PROGRAM.replace('%gmm.3', '%splash_mha_fwd_residuals.3'))
  result = compare.read_peer(tmp_path, parts)
  assert result['flops_per_chip'] == 5000
  assert 2 * result['flops_over_model_flops_at_least'] == result['flops_over_model_flops']


def test_rows():
  text = compare.row('4K', RESULT)
  assert text == '| 4K | 17.0 | 40.0 | 57.0 | 1.40 | 3,000 | 2,100 | 1 | 5,101 | 1.28 | 12 |'
  large = compare.row('4K', RESULT | {'peak_bytes_per_chip': 99e9, 'fits': False})
  assert '| 99.0 of 95: does not fit |' in large
  unknown = compare.row('32K', RESULT | {'flops_over_model_flops_at_least': 1.3})
  assert '| 57.0 | 1.30 to 1.40 | 3,000 |' in unknown
  lines = compare.table({'4K': RESULT, '128K': {'error': 'why'}}).splitlines()
  assert '| 128K | why |' in lines[-1]
  assert len({line.count('|') for line in lines}) == 1


def _checkout(folder: pathlib.Path) -> pathlib.Path:
  """A MaxText whose compile says what it is told."""
  script = folder / 'src/maxtext/trainers/pre_train/train_compile.py'
  script.parent.mkdir(parents=True)
  script.write_text('')
  return folder


def test_a_failure_is_a_row(tmp_path, monkeypatch, capsys):
  """Of a process that ends with an error, and of one that does not end."""
  monkeypatch.chdir(ROOT)
  maxtext = _checkout(tmp_path / 'maxtext')
  refused = 'print("error: JaxRuntimeError: Used 320.1G of 95.7G hbm."); raise SystemExit(1)'
  said = {'AdamW': refused, 'AdamW, expert 8': 'import time; time.sleep(60)'}

  def command(entry, parts, python, folder):
    expert = 'AdamW, expert 8' if entry.peer else 'AdamW'
    return [sys.executable, '-c', said[expert]]

  monkeypatch.setattr(compare, 'peer_command', command)
  arguments = [
    f'--maxtext={maxtext}',
    f'--python={sys.executable}',
    f'--out={tmp_path}',
    '--only=4K, MaxText, AdamW',
    '--minutes=0.05',
  ]
  assert compare.main(arguments) == 0
  printed = capsys.readouterr().out
  assert '| 4K, MaxText, AdamW | does not fit: 320.1G of 95.7G |' in printed
  assert '| 4K, MaxText, AdamW, expert 8 | no result in 0.05 minutes |' in printed
  assert (tmp_path / 'table.md').read_text() in printed
  assert len((tmp_path / 'maxtext.jsonl').read_text().splitlines()) == 2


def test_wrong_usage(tmp_path, capsys):
  assert compare.main(['--only=no such program']) == 2
  assert compare.main([f'--maxtext={tmp_path}', f'--out={tmp_path}']) == 2
  assert 'must be a checkout' in capsys.readouterr().err
  maxtext = _checkout(tmp_path / 'maxtext')
  assert compare.main([f'--maxtext={maxtext}', f'--python={tmp_path}/none']) == 2
  assert 'is no interpreter' in capsys.readouterr().err


def test_modules_that_are_not_there(monkeypatch):
  """Only what is missing has a stand-in, which imports and answers anything."""
  name = 'glm5_no_such_module'
  assert peer.stand_in(('json', name)) == [name]
  monkeypatch.setitem(sys.modules, name, sys.modules[name])  # To be removed in the end.
  module = __import__(name)
  assert module.data.Dataset() is not None and peer.stand_in(('json',)) == []
