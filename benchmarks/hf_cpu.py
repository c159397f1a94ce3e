"""This code and Hugging Face transformers on CPU: same weights, same tokens, same run.

  python -m benchmarks.hf_cpu [--repeats=7] [--batch=4] [--time=512]

Every side has a process of its own, so that its peak memory is its own, and they take turns: one
measurement at a time, ours, theirs, ours, theirs, so that whatever else the machine does hits all of
them. Measured after a warm-up (which holds XLA's compilation, reported apart): the loss alone
(`forward`), and the loss with the gradients of all parameters (`forward+backward`); no optimizer. The
indexer gets no gradient from either side. The last line of the output is JSON.

Exit status 1 if the losses differ by more than 1e-5.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.train import flops

# Libraries are imported by the process that uses them: the memory of one side must not hold the
# other's, and a child's peak starts at its parent's.

TOLERANCE = 1e-5
# 30.6M parameters, 17.3M of them active, all layers with an indexer and S > index_topk. The init is
# about 1 / sqrt(hidden_size), at which attention and selection visibly matter to the loss.
CONFIG = ModelConfig(
  vocab_size=8192, hidden_size=384, num_hidden_layers=6, first_k_dense_replace=1,
  intermediate_size=1344, moe_intermediate_size=192, n_routed_experts=16, num_experts_per_tok=4,
  num_attention_heads=8, num_key_value_heads=8, q_lora_rank=192, kv_lora_rank=128,
  qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64, index_n_heads=16, index_head_dim=32,
  index_topk=128, num_nextn_predict_layers=0, rope_theta=1e4, max_position_embeddings=4096,
  eos_token_id=(), pad_token_id=None, initializer_range=0.05,
)  # fmt: skip
TASKS = ('forward', 'forward+backward')
OURS = 'glm5_jax'
# Attention and expert implementations of transformers: its default, and the plain one.
THEIRS = {
  'transformers, sdpa + grouped_mm': {
    'attn_implementation': 'sdpa', 'experts_implementation': 'grouped_mm'
  },
  'transformers, eager': {'attn_implementation': 'eager', 'experts_implementation': 'eager'},
}  # fmt: skip
_MATMUL = 1024  # Side of the square matrices whose product measures the machine.

# A side's tasks: name -> function that computes and returns the loss (or GFLOP/s for 'matmul').
Side = dict[str, Callable[[], float]]


def _prepare(directory: pathlib.Path, batch: int, length: int) -> None:
  """Writes the checkpoint and the tokens that all sides read."""
  import jax

  from glm5_jax.compile import jit_once
  from glm5_jax.convert import save_hf
  from glm5_jax.modules.model import init_params

  params = jit_once(lambda key: init_params(CONFIG, key))(jax.random.key(0))
  save_hf(directory / 'checkpoint', CONFIG, params)
  tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (batch, length))
  np.save(directory / 'tokens.npy', tokens)


def _ours(directory: pathlib.Path) -> Side:
  import jax
  import jax.numpy as jnp

  from glm5_jax.convert import load_hf
  from glm5_jax.losses.language_model import cross_entropy
  from glm5_jax.modules.model import forward

  config, params = load_hf(directory / 'checkpoint')
  tokens = np.load(directory / 'tokens.npy').astype(np.int32)
  targets = np.roll(tokens, -1, axis=1)
  weights = np.ones(tokens.shape, np.float32)
  weights[:, -1] = 0
  batch = jax.device_put((tokens, targets, weights))

  def loss(params, tokens, targets, weights):
    hidden = forward(params, tokens, config=config, logits=False).hidden
    sums = cross_entropy(hidden, params['lm_head'], targets, weights)
    return sums.loss / sums.weight

  value, both = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
  product = jax.jit(jnp.matmul)
  square = jnp.ones((_MATMUL, _MATMUL))
  return {
    'forward': lambda: float(value(params, *batch)),
    'forward+backward': lambda: float(jax.block_until_ready(both(params, *batch))[0]),
    'matmul': lambda: _matmul_rate(lambda: product(square, square).block_until_ready()),
  }


def _theirs(directory: pathlib.Path, **implementation: str) -> Side:
  import torch
  import transformers

  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
    directory / 'checkpoint', dtype=torch.float32, **implementation
  )
  tokens = torch.as_tensor(np.load(directory / 'tokens.npy'))

  def loss():
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss

  def forward():
    with torch.inference_mode():
      return loss().item()

  def both():
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    return value.item()

  square = torch.ones(_MATMUL, _MATMUL)
  return {
    'forward': forward,
    'forward+backward': both,
    'matmul': lambda: _matmul_rate(lambda: square @ square),
  }


def _matmul_rate(multiply: Callable[[], Any], times: int = 5) -> float:
  """GFLOP/s of the fastest of a few products of square float32 matrices."""
  seconds = []
  for _ in range(times):
    start = time.perf_counter()
    multiply()
    seconds.append(time.perf_counter() - start)
  return 2e-9 * _MATMUL**3 / min(seconds)


def _peak_mib() -> float:
  """The largest resident size of this process so far."""
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _serve(connection: Connection, name: str, directory: pathlib.Path) -> None:
  """The process of one side: does the tasks it is sent until it is sent None."""
  side = _ours(directory) if name == OURS else _theirs(directory, **THEIRS[name])
  connection.send(_peak_mib())
  while (task := connection.recv()) is not None:
    start = time.perf_counter()
    value = side[task]()
    connection.send((value, time.perf_counter() - start, _peak_mib()))


class _Process:
  """A side, seen from outside."""

  def __init__(self, context, name: str, directory: pathlib.Path):
    self.name = name
    self.connection, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, directory), daemon=True)
    process.start()
    theirs.close()
    self.loaded_mib = self._receive()
    self.peak_mib = dict.fromkeys(TASKS, 0.0)
    self.seconds: dict[str, list[float]] = {task: [] for task in TASKS}
    self.warm_up_seconds: dict[str, float] = {}
    self.losses: set[float] = set()
    self.matmul_gflops = 0.0

  def _receive(self):
    try:
      return self.connection.recv()
    except EOFError:
      sys.exit(f'hf_cpu: the process of {self.name!r} died; its own message is above')

  def run(self, task: str, warm_up: bool = False) -> None:
    self.connection.send(task)
    value, seconds, peak = self._receive()
    if task == 'matmul':
      self.matmul_gflops = max(self.matmul_gflops, value)
      return
    self.losses.add(value)
    self.peak_mib[task] = peak
    if warm_up:
      self.warm_up_seconds[task] = seconds
    else:
      self.seconds[task].append(seconds)

  def median(self, task: str) -> float:
    return statistics.median(self.seconds[task])


def _measure(repeats: int, batch: int, length: int) -> list[_Process]:
  """Runs everything; the first process is ours."""
  context = multiprocessing.get_context('spawn')
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    prepare = context.Process(target=_prepare, args=(directory, batch, length))
    prepare.start()
    prepare.join()
    if prepare.exitcode:
      sys.exit('hf_cpu: cannot write the checkpoint; the message is above')
    processes = [_Process(context, name, directory) for name in (OURS, *THEIRS)]
    for task in TASKS:
      for process in processes:
        process.run(task, warm_up=True)
    for _ in range(repeats):
      for task in ('matmul', *TASKS):
        for process in processes:
          process.run(task)
    for process in processes:
      process.connection.send(None)
  return processes


def useful_flops(batch: int, length: int) -> dict[str, float]:
  """FLOPs that the mathematics of each task needs (glm5_jax.train.flops); the indexer only forward."""
  c, tokens = CONFIG, batch * length
  positions = np.broadcast_to(np.arange(length), (batch, length))
  pairs = flops.count_pairs(positions, None, c.index_topk)
  three_forwards = flops.train_flops(c, tokens, pairs)
  width = c.index_n_heads * c.index_head_dim
  inputs = c.q_lora_rank * width + c.hidden_size * (c.index_head_dim + c.index_n_heads)
  index = 2 * c.num_hidden_layers * (tokens * inputs + pairs.visible * width)
  return {'forward': three_forwards / 3, 'forward+backward': three_forwards - 2 * index}


def _results(processes: list[_Process], args: argparse.Namespace) -> dict[str, Any]:
  """Everything measured, ready for JSON."""
  tokens = args.batch * args.time
  useful = useful_flops(args.batch, args.time)
  sides = {}
  for p in processes:
    sides[p.name] = {
      'loss': min(p.losses),
      'loaded_mib': round(p.loaded_mib),
      'matmul_gflops': round(p.matmul_gflops, 1),
    } | {
      task: {
        'seconds': round(p.median(task), 4),
        'fastest_seconds': round(min(p.seconds[task]), 4),
        'tokens_per_second': round(tokens / p.median(task), 1),
        'useful_gflops': round(useful[task] / p.median(task) / 1e9, 1),
        'peak_mib': round(p.peak_mib[task]),
        'warm_up_seconds': round(p.warm_up_seconds[task], 2),
      }
      for task in TASKS
    }
  ours, theirs = processes[0], processes[1:]
  difference = max(abs(a - b) for p in theirs for a in p.losses for b in ours.losses)
  return {
    'benchmark': 'hf_cpu',
    'batch': args.batch,
    'time': args.time,
    'repeats': args.repeats,
    'cores': len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count(),
    'versions': {p: importlib.metadata.version(p) for p in ('jax', 'torch', 'transformers')},
    'sides': sides,
    'speed_ratio': {
      task: round(min(p.median(task) for p in theirs) / ours.median(task), 3) for task in TASKS
    },
    'memory_ratio': round(
      min(max(p.peak_mib.values()) for p in theirs) / max(ours.peak_mib.values()), 3
    ),
    'loss_difference': difference,
  }


def _table(result: dict[str, Any]) -> str:
  """The result for people. Ratios are against the better of the two of theirs, each time."""
  width = max(map(len, result['sides']))
  head = f'{"":{width}}  {"forward":>21}  {"forward+backward":>21}  {"peak memory":>11}  warm-up'
  lines = [
    f'batch {result["batch"]} x {result["time"]} tokens, float32, {result["cores"]} cores, medians'
    f' of {result["repeats"]}, taking turns',
    '',
    head,
  ]
  for name, side in result['sides'].items():
    cells = [
      f'{side[t]["seconds"]:7.3f} s {side[t]["tokens_per_second"]:6.0f} tok/s' for t in TASKS
    ]
    peak, warm = (
      max(side[t]['peak_mib'] for t in TASKS), sum(side[t]['warm_up_seconds'] for t in TASKS)
    )  # fmt: skip
    lines.append(f'{name:{width}}  {cells[0]}  {cells[1]}  {peak:7} MiB  {warm:5.1f} s')
  ratios = [f'{result["speed_ratio"][t]:.2f}x' for t in TASKS]
  lines += [
    f'{"ours against the better":{width}}  {ratios[0]:>21}  {ratios[1]:>21}'
    f'  {result["memory_ratio"]:10.2f}x',
    '',
    f'losses differ by at most {result["loss_difference"]:.1e} (allowed {TOLERANCE:.0e})',
    "peak memory: each side's own process (ru_maxrss), libraries, weights and compiler included;"
    ' before its first step '
    + ', '.join(str(s['loaded_mib']) for s in result['sides'].values())
    + ' MiB',
  ]
  for name, side in result['sides'].items():
    shares = [side[t]['useful_gflops'] for t in TASKS]
    lines.append(
      f'{name}: {shares[0]:.0f} and {shares[1]:.0f} useful GFLOP/s; a {_MATMUL} x {_MATMUL} matmul'
      f' there {side["matmul_gflops"]:.0f}'
    )
  return '\n'.join(lines)


def main() -> None:
  """Measures both sides and prints the table."""
  parser = argparse.ArgumentParser(prog='hf_cpu', description=__doc__.partition('\n')[0])
  parser.add_argument('--repeats', type=int, default=7, help='measurements of each task and side')
  parser.add_argument('--batch', type=int, default=4, help='rows')
  parser.add_argument('--time', type=int, default=512, help='tokens a row')
  args = parser.parse_args()
  if min(args.repeats, args.batch, args.time - 1) < 1:
    parser.error('--repeats and --batch must be at least 1, --time at least 2')
  result = _results(_measure(args.repeats, args.batch, args.time), args)
  print(_table(result))
  print(json.dumps(result), flush=True)
  if result['loss_difference'] > TOLERANCE:
    sys.exit(f'hf_cpu: the losses differ by {result["loss_difference"]:.2e}, more than {TOLERANCE}')


if __name__ == '__main__':
  main()
