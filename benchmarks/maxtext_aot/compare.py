"""MaxText beside this repository: one GLM-5 shape, one pod, one parser over both programs.

  python -m benchmarks.maxtext_aot --maxtext=DIR --python=venv-maxtext/bin/python
      [--only=REGEX] [--out=runs/maxtext] [--minutes=60] [--list]

It needs the TPU compiler (`pip install 'jax[tpu]'`), no TPU, and MaxText with an environment of its
own (Python 3.12):

  git clone https://github.com/AI-Hypercomputer/maxtext.git DIR && git -C DIR checkout e591f30
  python3.12 -m venv venv-maxtext
  venv-maxtext/bin/pip install -r benchmarks/maxtext_aot/requirements.txt

That is what MaxText's `train_compile` imports, with the jax and libtpu of requirements-tpu.lock.
What only its input pipelines import, such as tensorflow, is not needed: peer.py stands in for it.

Both sides have the same layers, the same rows and the same chips, and neither has an MTP step.
MaxText's keys are made from our config (`peer_keys`) but for those that ENTRIES name; all others
are its defaults: bfloat16 computation, float32 weights and moments, layers computed again in full,
AdamW. Both compiles stop before machine code. Both programs are read by glm5_jax/aot/hlo.py, and
model FLOPs and the bytes of ideal ZeRO-3 are those of our config for both.

MaxText's attention under an indexer's mask estimates its work as that of the whole square of
queries and keys, though it can skip blocks that are masked altogether, up to half of them. There
the table has both ends.

Each program's result, or why there is none, is kept as JSON in OUT/NAME.json, and what its compile
printed in OUT/NAME.log. One that has a result is not compiled again. The table goes to
OUT/table.md, the results of the table, a line each, to OUT/maxtext.jsonl.
"""

import argparse
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.aot_table import Case, compile_case, file_name, reason
from glm5_jax.aot import hlo, step
from glm5_jax.aot.chips import CHIPS
from glm5_jax.config import ModelConfig
from glm5_jax.train.prepare import Parts, prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOPOLOGY = 'v5p:8x8x8'
CHIPS_COUNT = 512
PEER_TOPOLOGY = 'v5p-1024'  # MaxText counts cores, two a chip.
_HEAD = (
  '| program | state, GB | temporary, GB | peak, GB | FLOPs, of the model\'s | gathered, GB'
  ' | summed, GB | exchanged, GB | sent, GB | of ZeRO-3 | compile, CPU s |',
  '|---|---|---|---|---|---|---|---|---|---|---|',
)  # fmt: skip
# Columns of the table by kind of collective; what is left is exchanged.
_GATHERED = ('all-gather',)
_SUMMED = ('all-reduce', 'reduce-scatter')
_PLAIN = (  # No MTP, one micro-batch of 4,096 tokens a chip.
  'model.num_nextn_predict_layers=0', 'train.mtp_steps=0', 'train.grad_accum=1',
)  # fmt: skip
_SHORT = (*_PLAIN, 'data.batch_size=512', 'train.batch_warmup_rows=0', 'train.batch_warmup_steps=0')
_ADAMW = ('optim.name=adamw',)
_DSA_32K = (*_PLAIN, 'data.seq_len=32768', 'data.batch_size=64', 'mesh.context=8')
_DSA_128K = (*_PLAIN, 'data.seq_len=131072', 'data.batch_size=16', 'mesh.context=32')


class Entry(NamedTuple):
  """A line of the table.

  Attributes:
    case: Our config; of MaxText's program that which has its shape, rows and mathematics.
    peer: MaxText's keys besides those of the shape; None is our program.
  """

  case: Case
  peer: tuple[str, ...] | None = None


ENTRIES: dict[str, Entry] = {
  '4K, ours, Muon Split': Entry(Case('pretrain.py', TOPOLOGY, _SHORT)),
  '4K, ours, AdamW': Entry(Case('pretrain.py', TOPOLOGY, (*_SHORT, *_ADAMW))),
  '4K, ours, AdamW, all of a layer again': Entry(
    Case('pretrain.py', TOPOLOGY, (*_SHORT, *_ADAMW, 'model.remat=block'))
  ),
  '4K, ours, AdamW, fsdp 512, all of a layer again': Entry(
    Case('pretrain.py', TOPOLOGY, (*_SHORT, *_ADAMW, 'mesh.expert=1', 'model.remat=block'))
  ),
  '4K, MaxText, AdamW': Entry(Case('pretrain.py', TOPOLOGY, _SHORT), ()),
  '4K, MaxText, AdamW, expert 8': Entry(
    Case('pretrain.py', TOPOLOGY, _SHORT), ('ici_expert_parallelism=8',)
  ),
  '4K, MaxText, Muon': Entry(Case('pretrain.py', TOPOLOGY, _SHORT), ('opt_type=muon',)),
  '4K, MaxText, Muon, expert 8': Entry(
    Case('pretrain.py', TOPOLOGY, _SHORT), ('opt_type=muon', 'ici_expert_parallelism=8')
  ),
  'DSA 32K, ours, Muon Split': Entry(Case('dsa_sparse.py', TOPOLOGY, _DSA_32K)),
  'DSA 32K, ours, AdamW': Entry(Case('dsa_sparse.py', TOPOLOGY, (*_DSA_32K, *_ADAMW))),
  'DSA 32K, MaxText, AdamW': Entry(
    Case('dsa_sparse.py', TOPOLOGY, _DSA_32K), ('ici_context_parallelism=8',)
  ),
  'DSA 32K, MaxText, AdamW, expert 8': Entry(
    Case('dsa_sparse.py', TOPOLOGY, _DSA_32K),
    ('ici_context_parallelism=8', 'ici_expert_parallelism=8'),
  ),
  'DSA 128K, ours, AdamW': Entry(Case('dsa_sparse.py', TOPOLOGY, (*_DSA_128K, *_ADAMW))),
  'DSA 128K, MaxText, AdamW': Entry(
    Case('dsa_sparse.py', TOPOLOGY, _DSA_128K),
    ('ici_context_parallelism=32', 'allow_split_physical_axes=true'),
  ),
}  # fmt: skip


def prepared(case: Case) -> Parts:
  """What our config asks for, without a compile."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  file, _, variant = case.config.partition(':')
  functions = runpy.run_path(str(ROOT / f'configs/glm5_744b_{file}'))
  config = functions['get_config'](*([variant] if variant else []))
  changes = (change.partition('=') for change in case.changes)
  config.update_from_flattened_dict(
    {key: int(value) if value.isdigit() else value for key, _, value in changes}
  )
  return prepare(config)


def peer_keys(parts: Parts, chips: int = CHIPS_COUNT) -> dict[str, Any]:
  """MaxText's names of a run's shape and rows.

  Raises:
    ValueError: it has no such shape.
  """
  model, plan = parts.model, parts.plan
  if model.attention != 'mla' or model.indexer_types is not None or parts.objective.mtp_steps:
    raise ValueError('MaxText is given latent attention, an indexer in every layer, no MTP')
  return {
    'per_device_batch_size': plan.rows // plan.micro_batches / chips,
    'max_target_length': plan.seq_len,
    'gradient_accumulation_steps': plan.micro_batches,
    **_shape(model),
    **(_indexer(model, parts.objective.indexer_loss_weight) if model.sparse_attention else {}),
  }


def _shape(model: ModelConfig) -> dict[str, Any]:
  return {
    'decoder_block': 'deepseek',
    'attention_type': 'mla',
    'mlp_activations': '["silu","linear"]',
    'logits_via_embedding': 'false',
    'enable_dropout': 'false',
    'vocab_size': model.vocab_size,
    'base_emb_dim': model.hidden_size,
    'base_num_decoder_layers': model.num_hidden_layers,
    'first_num_dense_layers': model.first_k_dense_replace,
    'base_mlp_dim': model.intermediate_size,
    'base_moe_mlp_dim': model.moe_intermediate_size,
    'num_experts': model.n_routed_experts,
    'num_experts_per_tok': model.num_experts_per_tok,
    'shared_experts': model.n_shared_experts,
    'routed_scaling_factor': model.routed_scaling_factor,
    'routed_score_func': model.scoring_func,
    'routed_bias': 'true',
    'base_num_query_heads': model.num_attention_heads,
    'base_num_kv_heads': model.num_attention_heads,
    'q_lora_rank': model.q_lora_rank,
    'kv_lora_rank': model.kv_lora_rank,
    'qk_nope_head_dim': model.qk_nope_head_dim,
    'qk_rope_head_dim': model.qk_rope_head_dim,
    'v_head_dim': model.v_head_dim,
    'rope_type': 'default',
    'rope_max_timescale': int(model.rope_theta),
    'normalization_layer_epsilon': model.rms_norm_eps,
  }


def _indexer(model: ModelConfig, loss_weight: float) -> dict[str, Any]:
  """The last two are the only attention by kernels that MaxText has for its indexer."""
  return {
    'use_indexer': 'true',
    'indexer_n_heads': model.index_n_heads,
    'indexer_head_dim': model.index_head_dim,
    'indexer_topk': model.index_topk,
    'indexer_sparse_training': 'true',
    'indexer_loss_scaling_factor': loss_weight,
    'attention': 'flash',
    'use_tokamax_splash': 'true',
  }


def peer_command(entry: Entry, parts: Parts, python: str, folder: pathlib.Path) -> list[str]:
  """The compile of MaxText's program, whose files go to `folder`."""
  keys = {
    **peer_keys(parts),
    'compile_topology': PEER_TOPOLOGY, 'compile_topology_num_slices': 1,
    'dataset_type': 'synthetic', 'enable_checkpointing': 'false', 'run_name': 'aot',
    'base_output_directory': folder,
  }  # fmt: skip
  arguments = [f'{key}={value}' for key, value in keys.items()]
  script = str(pathlib.Path(__file__).with_name('peer.py'))
  return [python, script, f'--out={folder}', *arguments, *(entry.peer or ())]


def compile_peer(
  entry: Entry, maxtext: pathlib.Path, python: str, log: pathlib.Path, minutes: float
) -> dict[str, Any]:
  """The JSON of MaxText's program, or {'error': why there is none}; `log` has what it prints."""
  folder = log.with_suffix('').absolute()
  folder.mkdir(parents=True, exist_ok=True)
  for name in ('program.json', 'program.txt'):
    (folder / name).unlink(missing_ok=True)
  parts = prepared(entry.case)
  places = os.pathsep.join(map(str, (maxtext.absolute() / 'src', ROOT)))
  # As for ours: the compiler looks for a TPU at first, and for other processes that use it.
  environment = os.environ | {
    'PYTHONPATH': places, 'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  }  # fmt: skip
  command = peer_command(entry, parts, python, folder)
  with log.open('w') as out:
    try:
      done = subprocess.run(
        command, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False,
        timeout=60 * minutes,
      )  # fmt: skip
    except subprocess.TimeoutExpired:
      return {'error': f'no result in {minutes:g} minutes'}
  if done.returncode:
    return {'error': reason(log.read_text()) or f'exit status {done.returncode}'}
  return read_peer(folder, parts, expert=_expert(entry.peer or ()))


def _expert(keys: Sequence[str]) -> int:
  """Among how many chips MaxText divides the experts."""
  found = [key.partition('=')[2] for key in keys if key.startswith('ici_expert_parallelism=')]
  return int(found[0]) if found else 1


def read_peer(folder: pathlib.Path, parts: Parts, expert: int = 1) -> dict[str, Any]:
  """MaxText's program as our compiles report theirs, see experiments/aot_compile.py.

  Args:
    folder: where peer.py has written.
    parts: the run whose mathematics are counted.
    expert: among how many chips the experts are divided.
  """
  found = json.loads((folder / 'program.json').read_text())
  text = (folder / 'program.txt').read_text()
  work = hlo.measure(text, step.filled_rows(parts.model.replace(expert_capacity=0.0), expert))
  chip = CHIPS[TOPOLOGY.partition(':')[0]]
  flops = step.model_flops(parts)
  # Its attention under an indexer's mask estimates the whole square; what is skipped is not known.
  squares = sum(n for name, n in work.kernels.items() if name.startswith('splash_mha'))
  skipped = squares / 2 if parts.model.sparse_attention else 0.0
  return {
    'topology': TOPOLOGY,
    'chips': CHIPS_COUNT,
    'argument_bytes_per_chip': found['argument_bytes'],
    'temporary_bytes_per_chip': found['temporary_bytes'],
    'peak_bytes_per_chip': found['peak_bytes'],
    'hbm_bytes_per_chip': chip.hbm_bytes,
    'fits': found['peak_bytes'] <= chip.hbm_bytes,
    'compile_cpu_seconds': round(found['compile_cpu_seconds'], 1),
    'tokens': parts.plan.rows * parts.plan.seq_len,
    'flops_per_chip': work.flops,
    'model_flops': flops,
    'flops_over_model_flops': work.flops * CHIPS_COUNT / flops,
    'flops_over_model_flops_at_least': (work.flops - skipped) * CHIPS_COUNT / flops,
    'bytes_accessed_per_chip': work.bytes,
    'collectives_per_chip': {
      name: {
        'count': c.calls, 'async_count': c.started, 'bytes': c.payload, 'sent_bytes': c.sent,
      }
      for name, c in sorted(work.collectives.items())
    },
    'zero3_bytes_per_chip': step.zero3_bytes(parts),
    'kernel_flops_per_chip': dict(sorted(work.kernels.items())),
    'loops_of_unknown_length': work.unknown_loops,
    'versions': found.get('versions', {}),
  }  # fmt: skip


def row(name: str, result: Mapping[str, Any]) -> str:
  """A line of the table."""
  if 'error' in result:
    return f'| {name} | {result["error"]} |' + ' |' * (_HEAD[1].count('|') - 3)
  sent = {kind: c['sent_bytes'] / 1e9 for kind, c in result['collectives_per_chip'].items()}
  gathered, summed = (sum(sent.get(k, 0.0) for k in kinds) for kinds in (_GATHERED, _SUMMED))
  total = sum(sent.values())
  gigabytes = (result[f'{kind}_bytes_per_chip'] / 1e9 for kind in ('argument', 'temporary', 'peak'))
  ratio = result['flops_over_model_flops']
  least = result.get('flops_over_model_flops_at_least', ratio)
  cells = [
    name, *(f'{n:.1f}' for n in gigabytes),
    f'{ratio:.2f}' if least == ratio else f'{least:.2f} to {ratio:.2f}',
    *(f'{n:,.0f}' for n in (gathered, summed, total - gathered - summed, total)),
    f'{total * 1e9 / result["zero3_bytes_per_chip"]:.2f}', f'{result["compile_cpu_seconds"]:.0f}',
  ]  # fmt: skip
  if not result['fits']:
    cells[3] += f' of {result["hbm_bytes_per_chip"] / 1e9:.0f}: does not fit'
  return f'| {" | ".join(cells)} |'


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
  """All results, as Markdown."""
  return '\n'.join([*_HEAD, *(row(name, result) for name, result in results.items())])


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0 done, 2 wrong usage."""
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.maxtext_aot', description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument('--maxtext', type=pathlib.Path, help='a checkout of MaxText')
  parser.add_argument('--python', default='venv-maxtext/bin/python', help='of its environment')
  parser.add_argument('--only', default='', help='programs whose name matches this expression')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('runs/maxtext'))
  parser.add_argument(
    '--minutes', type=float, default=60.0, help='at most, for one of its compiles'
  )
  parser.add_argument('--list', action='store_true', help='print the commands and compile nothing')
  args = parser.parse_args(argv)
  chosen = {name: entry for name, entry in ENTRIES.items() if re.search(args.only, name)}
  if not chosen:
    print(f'error: --only={args.only} matches none of {list(ENTRIES)}', file=sys.stderr)
    return 2
  if args.list:
    for name, entry in chosen.items():
      ours = entry.peer is None
      command = entry.case.command() if ours else peer_command(
        entry, prepared(entry.case), args.python, args.out / file_name(name)
      )  # fmt: skip
      print(f'{name}: {" ".join(["python", *command[1:]] if ours else command)}')
    return 0
  checkout = args.maxtext and args.maxtext / 'src/maxtext/trainers/pre_train/train_compile.py'
  ours_alone = all(entry.peer is None for entry in chosen.values())
  if not ours_alone and not (checkout and checkout.is_file()):
    print('error: --maxtext=DIR must be a checkout of MaxText; see --help', file=sys.stderr)
    return 2
  if not ours_alone and not shutil.which(args.python):
    print(f'error: --python={args.python} is no interpreter; see --help', file=sys.stderr)
    return 2
  args.out.mkdir(parents=True, exist_ok=True)
  results: dict[str, Any] = {}
  for name, entry in chosen.items():
    path = args.out / f'{file_name(name)}.json'
    if not path.exists() or 'error' in json.loads(path.read_text()):
      print(f'compiling {name}', file=sys.stderr, flush=True)
      log = path.with_suffix('.log')
      if entry.peer is None:
        found = compile_case(entry.case, log)
      else:
        found = compile_peer(entry, args.maxtext, args.python, log, args.minutes)
      path.write_text(json.dumps({'name': name} | found) + '\n')
    results[name] = json.loads(path.read_text())
  text = table(results)
  (args.out / 'table.md').write_text(text + '\n')
  lines = ''.join(json.dumps(result) + '\n' for result in results.values())
  (args.out / 'maxtext.jsonl').write_text(lines)
  print(text)
  return 0
