"""How fast the engine and its server are, against transformers and against themselves.

  .venv-hf/bin/python -m benchmarks.serving --part=peer        transformers' generate (needs torch)
  .venv/bin/python -m benchmarks.serving --part=attention      sparse and dense decoding
  .venv/bin/python -m benchmarks.serving --part=drafting [--checkpoint=RUN]
  .venv/bin/python -m benchmarks.serving --part=prefix         conversations
  .venv/bin/python -m benchmarks.serving --part=load           500 requests over HTTP
  .venv-tpu/bin/python -m benchmarks.serving --part=pod --topology=v5p:4x4x4 --context=8192 --batch=32

The model has 30.6M parameters (that of benchmarks/hf_cpu.py) and random weights; a trained one matters
to drafting only, whose --checkpoint is the folder of a training run. Sides take turns in one run, so that
whatever else the machine does hits all of them. `pod` runs nothing: it is GLM-5's decoding step through the
TPU compiler, see pod.py; `--batch` rows are those of a device. Prints a Markdown table, then a JSON line.

Exit status 1 if something is not as it must be: tokens that differ, an answer lost, a page not freed.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys
from typing import Any

# What imports jax is imported by the part that needs it: `peer` measures memory.


def _peer(args: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
  from benchmarks.serving import peer

  result = peer.measure(args.batch or [1, 16], 512, 128, args.repeats)
  return result, peer.table(result), peer.wrong(result)


def _attention(args: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
  from benchmarks.serving import decoding, runs

  contexts = [1 << i for i in range(10, 16)]
  model = runs.random_model(max_position_embeddings=contexts[-1] + 1)
  result = decoding.attention(model, contexts, (args.batch or [1])[0], 16, args.repeats)
  return result, decoding.attention_table(result), ''


def _drafting(args: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
  from benchmarks.serving import decoding, runs

  model = runs.random_model(num_nextn_predict_layers=1)
  if args.checkpoint:
    model = runs.loaded(pathlib.Path(args.checkpoint))
  batch = (args.batch or [4])[0]
  result = decoding.drafting(model, (1, 2, 3), batch, 128, 64, args.repeats, args.temperature)
  result |= {'checkpoint': args.checkpoint}
  return result, decoding.drafting_table(result), ''


def _prefix(args: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
  from benchmarks.serving import decoding, runs

  batch = (args.batch or [4])[0]
  result = decoding.prefix(runs.random_model(), batch, 10, 96, 32, args.repeats)
  return result, decoding.prefix_table(result), ''


def _load(args: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
  from benchmarks.serving import load
  from glm5_jax.infer.programs import EngineConfig

  # A tenth by one client, three by eight, the rest by 32.
  few, some = args.requests // 10, 3 * args.requests // 10
  plan = [(1, few), (8, some), (32, args.requests - few - some)]
  sizes = EngineConfig(max_length=320, pages=129, max_sequences=16)
  with load.server(sizes, requests=64) as (port, vocab):
    result = load.levels(port, vocab, plan, (32, 256), (16, 64), timeout=600.0)
  return result, load.table(result), load.wrong(result)


def _pod(args: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
  os.environ |= {
    'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'
  }  # fmt: skip
  from benchmarks.serving import pod
  from glm5_jax.train.prepare import ConfigError

  try:
    result = pod.measure(
      args.topology, args.context, (args.batch or [32])[0], args.kernels, args.new
    )
  except ConfigError as e:
    sys.exit(f'serving: {e}')
  return result, pod.table(result), '' if result['fits'] else 'does not fit'


PARTS = {
  'peer': _peer, 'attention': _attention, 'drafting': _drafting, 'prefix': _prefix, 'load': _load,
  'pod': _pod,
}  # fmt: skip


def main() -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='serving', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--part', required=True, choices=PARTS)
  parser.add_argument('--repeats', type=int, default=3, help='measurements of each side')
  parser.add_argument('--batch', type=int, action='append', help='rows; for peer, again for more')
  parser.add_argument('--requests', type=int, default=500, help='of load, in total')
  parser.add_argument('--checkpoint', default='', help='for drafting: the folder of a training run')
  parser.add_argument('--temperature', type=float, default=0.0, help='of drafting')
  parser.add_argument('--topology', default='v5p:4x4x4', help='of pod')
  parser.add_argument(
    '--kernels', default='reference', choices=('reference', 'pallas'), help='of pod'
  )
  parser.add_argument('--new', type=int, default=1, help='of pod: new tokens of every row')
  parser.add_argument('--context', type=int, default=8192, help='of pod: tokens of every row')
  args = parser.parse_args()
  if min([args.repeats, *(args.batch or [])]) < 1 or args.requests < 10:
    parser.error('--repeats and --batch must be at least 1, --requests at least 10')
  result, table, wrong = PARTS[args.part](args)
  cores = len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count()
  versions = {'jax': importlib.metadata.version('jax')}
  print(f'\n{table}\n')
  print(json.dumps({'benchmark': 'serving', 'part': args.part, 'cores': cores,
                    'versions': versions, 'repeats': args.repeats, **result}), flush=True)  # fmt: skip
  if wrong:
    print(f'serving: {wrong}', file=sys.stderr)
  if args.part == 'pod':
    os._exit(int(bool(wrong)))  # The compiler goes on in a thread.
  return int(bool(wrong))


if __name__ == '__main__':
  sys.exit(main())
