"""What the TPU compiler says of the 744B configs on pods that are not here, as one table.

  python -m benchmarks.aot_table [--only=REGEX] [--out=runs/aot] [--list]

Every case is one `python -m experiments.aot_compile` in a process of its own. Its output is kept in
OUT/NAME.log and its result, or why there is none, as JSON in OUT/NAME.json. A case that has a result
is not compiled again, so an interrupted run goes on where it was; one that failed is tried anew. Then the table of all results is
printed and written to OUT/table.md, and their JSON, a line a case, to OUT/aot.jsonl.

The compiler stops before machine code (`--plan`), without which nothing here would be another
number but minutes. A case takes a few GB of memory; they run one after another.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Why no compile: at most this much of the compiler's message.
_REASON = 300
_HEAD = (
  '| compile | chips | state, GB | temporary, GB | peak, GB | FLOPs, of the model\'s | sent, of'
  ' ZeRO-3 | compute, s | HBM, s | network, s | exposed, s | MFU as scheduled | MFU at most |',
  '|---|---|---|---|---|---|---|---|---|---|---|---|---|',
)  # fmt: skip


class Case(NamedTuple):
  """One compile: a config, the chips, and what is changed in the config."""

  config: str
  topology: str
  changes: tuple[str, ...] = ()

  def command(self) -> list[str]:
    changes = [f'--config.{change}' for change in self.changes]
    config = f'--config=configs/glm5_744b_{self.config}'
    return [sys.executable, '-m', 'experiments.aot_compile', config, *changes,
            f'--topology={self.topology}', '--plan']  # fmt: skip


# DSA with rows of 32K: the sparse stage on what the paper has no stage for, since others compare at 32K.
_AT_32K = ('data.seq_len=32768', 'mesh.context=8', 'data.batch_size=2048', 'train.grad_accum=8')
# An update of reasoning RL on 1,024 full rows of 16K.
_UPDATE = (
  'mesh.fsdp=-1', 'mesh.expert=8', 'mesh.context=4', 'rl.seq_len=16384', 'rl.episode.max_tokens=16384',
  'rl.micro_rows=256', 'train.kernels=pallas', 'model.expert_matmul=ragged_dot',
  'model.expert_capacity=2.0',
)  # fmt: skip
# Micro-batches have to divide: fewer chips take more of them.
CASES: dict[str, Case] = {
  '4K, 1024 v5p': Case('pretrain.py', 'v5p:8x8x16'),
  '4K, 512 v5p': Case('pretrain.py', 'v5p:8x8x8', ('train.grad_accum=16',)),
  '4K, 256 v5p': Case('pretrain.py', 'v5p:4x8x8', ('train.grad_accum=64',)),
  '4K, 128 v5p': Case('pretrain.py', 'v5p:4x4x8', ('train.grad_accum=128',)),
  '4K, 512 tpu7x': Case('pretrain.py', 'tpu7x:8x8x8'),
  '4K, 256 tpu7x': Case('pretrain.py', 'tpu7x:4x8x8', ('train.grad_accum=32',)),
  '4K, 256 v6e': Case('pretrain.py', 'v6e:16x16', ('train.grad_accum=64',)),
  '32K, 1024 v5p': Case('midtrain.py:32k', 'v5p:8x8x16'),
  '128K, 1024 v5p': Case('midtrain.py:128k', 'v5p:8x8x16'),
  '32K, 512 tpu7x': Case('midtrain.py:32k', 'tpu7x:8x8x8'),
  '128K, 512 tpu7x': Case('midtrain.py:128k', 'tpu7x:8x8x8'),
  '200K, 1024 v5p': Case('midtrain.py:200k', 'v5p:8x8x16'),
  '200K, 512 v5p': Case('midtrain.py:200k', 'v5p:8x8x8', ('train.grad_accum=20',)),
  '200K, 256 v5p': Case('midtrain.py:200k', 'v5p:4x8x8', ('train.grad_accum=40',)),
  '200K, 512 tpu7x': Case('midtrain.py:200k', 'tpu7x:8x8x8'),
  'DSA warm-up 200K, 128 v5p': Case('dsa_warmup.py', 'v5p:4x4x8'),
  'DSA warm-up 200K, 64 tpu7x': Case('dsa_warmup.py', 'tpu7x:4x4x4'),
  'DSA warm-up 200K, 256 v6e': Case('dsa_warmup.py', 'v6e:16x16'),
  'DSA 32K, 1024 v5p': Case('dsa_sparse.py', 'v5p:8x8x16', _AT_32K),
  'DSA 200K, 1024 v5p': Case('dsa_sparse.py', 'v5p:8x8x16'),
  'DSA 200K, 512 v5p': Case('dsa_sparse.py', 'v5p:8x8x8', ('train.grad_accum=10',)),
  'DSA 200K, 256 v5p': Case('dsa_sparse.py', 'v5p:4x8x8', ('train.grad_accum=40',)),
  'DSA 200K, 512 tpu7x': Case('dsa_sparse.py', 'tpu7x:8x8x8'),
  'RL update 16K, 1024 v5p': Case('reasoning_rl.py', 'v5p:8x8x16', _UPDATE),
  'RL update 16K, 512 tpu7x': Case('reasoning_rl.py', 'tpu7x:8x8x8', _UPDATE),
  # What each choice buys.
  '4K, 1024 v5p, inputs on the host': Case(
    'pretrain.py', 'v5p:8x8x16', ('model.offload_inputs=True',)
  ),
  '4K, 1024 v5p, all of a layer again': Case('pretrain.py', 'v5p:8x8x16', ('model.remat=block',)),
  '4K, 1024 v5p, nothing again': Case('pretrain.py', 'v5p:8x8x16', ('model.remat=none',)),
  '4K, 1024 v5p, micro-batches half as large': Case(
    'pretrain.py', 'v5p:8x8x16', ('train.grad_accum=16',)
  ),
  '4K, 1024 v5p, no kernels': Case('pretrain.py', 'v5p:8x8x16', ('train.kernels=reference',)),
  'DSA 200K, 1024 v5p, attention kept': Case(
    'dsa_sparse.py', 'v5p:8x8x16', ('model.remat=block_but_attention',)
  ),
  'DSA 200K, 1024 v5p, no kernels': Case('dsa_sparse.py', 'v5p:8x8x16', ('train.kernels=reference',)),
}  # fmt: skip


def compile_case(case: Case, log: pathlib.Path) -> dict[str, Any]:
  """The JSON of a compile, or {'error': why there is none}. Writes what it prints to `log`."""
  done = subprocess.run(case.command(), capture_output=True, text=True, check=False)
  log.write_text(done.stdout + done.stderr)
  if done.returncode == 0:
    return json.loads(done.stdout.strip().splitlines()[-1])
  return {'error': reason(done.stderr) or f'exit status {done.returncode}'}


def reason(text: str) -> str:
  """Of what a failed compile printed, what a person wants to know."""
  if used := re.search(r'Used ([\d.]+\w) of ([\d.]+\w) hbm', text):
    return f'does not fit: {used[1]} of {used[2]}'
  if used := re.search(r'temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)', text):
    return f'does not fit: {used[1]} of temporaries, of {used[2]}'
  errors = [line for line in text.splitlines() if line.startswith('error: ')]
  lines = errors or text.strip().splitlines()
  return lines[-1].removeprefix('error: ')[:_REASON] if lines else ''


def row(name: str, result: Mapping[str, Any]) -> str:
  """A line of the table."""
  if 'error' in result:
    return f'| {name} | {result["error"]} |' + ' |' * (_HEAD[1].count('|') - 3)
  seconds = result['roofline_seconds']
  sent = sum(c['sent_bytes'] for c in result['collectives_per_chip'].values())
  gigabytes = (result[f'{kind}_bytes_per_chip'] / 1e9 for kind in ('argument', 'temporary', 'peak'))
  cells = [
    name, f'{result["chips"]:,}', *(f'{n:.1f}' for n in gigabytes),
    f'{result["flops_over_model_flops"]:.2f}', f'{sent / result["zero3_bytes_per_chip"]:.2f}',
    *(f'{seconds[resource]:.2f}' for resource in ('compute', 'memory', 'network', 'exposed')),
    f'{result["mfu_scheduled"]:.0%}', f'{result["mfu_overlapped"]:.0%}',
  ]  # fmt: skip
  if not result['fits']:
    cells[4] += f' of {result["hbm_bytes_per_chip"] / 1e9:.0f}: does not fit'
  return f'| {" | ".join(cells)} |'


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
  """All results, as Markdown."""
  return '\n'.join([*_HEAD, *(row(name, result) for name, result in results.items())])


def file_name(name: str) -> str:
  """A case's name as that of a file, without suffix."""
  return re.sub(r'\W+', '_', name).strip('_').lower()


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default='', help='cases whose name matches this expression')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('runs/aot'))
  parser.add_argument('--list', action='store_true', help='print the commands and compile nothing')
  args = parser.parse_args(argv)
  chosen = {name: case for name, case in CASES.items() if re.search(args.only, name)}
  if not chosen:
    print(f'error: --only={args.only} matches none of {list(CASES)}', file=sys.stderr)
    return 2
  if args.list:
    for name, case in chosen.items():
      print(f'{name}: python {" ".join(case.command()[1:])}')
    return 0
  args.out.mkdir(parents=True, exist_ok=True)
  results: dict[str, Any] = {}
  for name, case in chosen.items():
    path = args.out / f'{file_name(name)}.json'
    if not path.exists() or 'error' in json.loads(path.read_text()):
      print(f'compiling {name}', file=sys.stderr, flush=True)
      found = compile_case(case, path.with_suffix('.log'))
      path.write_text(json.dumps({'name': name, 'command': case.command()[1:]} | found) + '\n')
    results[name] = json.loads(path.read_text())
  text = table(results)
  (args.out / 'table.md').write_text(text + '\n')
  lines = ''.join(json.dumps(result) + '\n' for result in results.values())
  (args.out / 'aot.jsonl').write_text(lines)
  print(text)
  return 0


if __name__ == '__main__':
  sys.exit(main())
