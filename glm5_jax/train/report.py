"""report.md: what a run did, in one page with figures.

Everything comes from the run's folder and a final look at the model; the page is written whole or not
at all. A run that was stopped early gets one too, marked as such.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax.train import flops, machine, metrics, plots
from glm5_jax.train.summary import Run
from glm5_jax.train.workdir import write_atomically


def write(run: Run) -> str:
  """Writes plots/*.png and report.md; returns a summary of a few lines for the terminal."""
  rows = metrics.read(run.path / 'metrics.jsonl')
  captions = plots.save_all(run.path / 'plots', rows, run.selection)
  train = [r for r in rows if 'loss' in r]
  sections = [
    _title(run), _results(run, rows), _figures(captions), _samples_section(run),
    _speed(run, train), _model(run), _data(run), _reproduce(run),
  ]  # fmt: skip
  file = run.path / 'report.md'
  write_atomically(file, '\n\n'.join(s for s in sections if s) + '\n')
  return '\n'.join([*_summary(run, train), f'report: {file}'])


def _title(run: Run) -> str:
  steps = run.config['train']['steps']
  lines = [
    f'# {run.config["model"]["size"]}, {run.config["stage"]}: {run.step:,} of {steps:,} steps'
  ]
  if run.stopped:
    lines.append(
      f'**Stopped early** at step {run.step:,} of {steps:,}: {run.stopped}. The learning rate had not'
      ' come down yet, so the numbers below are not those of a finished run.'
    )
  return '\n\n'.join(lines)


def _results(run: Run, rows: list[dict[str, Any]]) -> str:
  e = run.evaluation
  if e is None:
    last = [r for r in rows if 'eval/loss' in r]
    if not last:
      return '## Held-out files\n\nNot evaluated before the run was stopped.'
    r = last[-1]
    return (
      f'## Held-out files\n\nThe last evaluation was at step {r["step"]:,}, on a part of them: loss'
      f' {_number(r["eval/loss"])} nats per token, {_number(r["eval/bits_per_byte"], 3)} bits per byte.'
    )
  held_out = [p.summary() for p in run.corpus.validation]
  documents, size = (sum(s[k] for s in held_out) for k in ('documents', 'bytes'))
  table = [('this model', e.bits_per_byte)]
  table += [
    (f'with {attention} attention instead', other.bits_per_byte)
    for attention, other in run.evaluations.items()
    if other is not e
  ]
  names = {
    'gzip_by_file': '`gzip -9`, file by file', 'xz_by_file': '`xz -9`, file by file',
    'gzip_together': '`gzip -9`, all files as one', 'xz_together': '`xz -9`, all files as one',
  }  # fmt: skip
  table += [(names[k], v) for k, v in run.baselines.items() if k in names]
  lines = [
    '## Held-out files',
    f'{documents:,} documents of {size:,} bytes that the model never saw ({e.tokens:,} tokens, the end'
    ' of each document included), all of them, the same for every row:',
    _table(('', 'bits per byte'), [(name, f'{value:.3f}') for name, value in table]),
  ]
  facts = [('loss', f'{e.loss:.4f} nats per token'), ('accuracy', f'{e.accuracy:.1%}')]
  facts += [(f'MTP step {k} loss', f'{x:.4f}') for k, x in enumerate(e.mtp_loss, 1)]
  if e.recall:
    facts.append(('indexer recall', f'{np.mean(e.recall):.1%} of the attention mass over all keys'))
    facts.append(('by layer, MTP steps last', ', '.join(f'{x:.1%}' for x in e.recall)))
  lines.append(_table(('', ''), facts))
  return '\n\n'.join(lines)


def _figures(captions: Mapping[str, str]) -> str:
  return '\n\n'.join(
    ['## Curves', *(f'### {text}\n\n![{text}](plots/{name})' for name, text in captions.items())]
  )


def _samples_section(run: Run) -> str:
  if not run.samples:
    return ''
  lines = [
    '## Samples',
    'The prompt is a piece of a held-out document, or what eval.prompt asked for.',
  ]
  for title, (prompt, text) in run.samples.items():
    body = f'{prompt}⟦{text}⟧'
    fence = '`' * max(3, 1 + _longest_run_of_ticks(body))
    lines += [f'### {title}', 'Generated text is between ⟦ and ⟧.', f'{fence}text\n{body}\n{fence}']
  return '\n\n'.join(lines)


def _speed(run: Run, train: list[dict[str, Any]]) -> str:
  facts = []
  if train:
    speed, work, seconds = _rates(train)
    facts += [
      ('tokens per second', f'{speed:,.0f}'),
      ('model FLOP/s', f'{work / 1e9:,.1f} GFLOP/s ([what counts](#how-flops-are-counted))'),
      ('time in training steps', _duration(seconds)),
      ('tokens seen', f'{sum(r["tokens"] for r in train) * _every(train):,.0f}'),
      ('skipped steps', f'{train[-1]["skipped"]}'),
    ]
  facts += [
    ('compilation of the step', _duration(run.compile_seconds)),
    ('peak memory of the process', f'{machine.peak_memory_gib():.2f} GiB'),
    *machine.describe().items(),
    ('versions', ', '.join(f'{k} {v}' for k, v in machine.versions().items())),
  ]
  note = ' '.join((flops.__doc__ or '').split('\n\n', 1)[1].split())
  return '\n\n'.join(
    ['## Speed and machine', _table(('', ''), facts), f'### How FLOPs are counted\n\n{note}']
  )


def _model(run: Run) -> str:
  c = run.model
  main, mtp = run.parameters
  facts = [
    ('parameters', f'{main:,}, and {mtp:,} in the MTP layer'),
    ('matrix elements a token passes', f'{flops.matmul_params(c):,}'),
    ('layers', f'{c.num_hidden_layers}, the first {c.first_k_dense_replace} dense'),
    ('experts', f'{c.n_routed_experts}, {c.num_experts_per_tok} chosen, {c.n_shared_experts} shared'),
    ('trained', run.objective.stage.trains),
    ('attention', f'{c.attention}, {c.num_attention_heads} heads'),
    ('selected keys', f'{c.index_topk} of {run.corpus.config.seq_len} at most'
                      if c.sparse_attention else 'all'),
    ('MTP', f'{run.objective.mtp_steps} steps with {c.num_nextn_predict_layers} layer'),
    ('compute and parameter type', f'{c.dtype}, {c.param_dtype}'),
  ]  # fmt: skip
  return '## Model\n\n' + _table(('', ''), facts)


def _data(run: Run) -> str:
  corpus, summary = run.corpus, run.corpus.summary()
  lines = ['## Data']
  rows = [
    (side, name, f'{s["documents"]:,}', f'{s["bytes"]:,}', f'{s["targets"]:,}',
     summary['licences'].get(name) or 'not stated')
    for side in ('train', 'validation')
    for name, s in summary[side].items()
  ]  # fmt: skip
  lines.append(_table(('side', 'source', 'documents', 'bytes', 'tokens', 'licence'), rows))
  tokenizer = summary['tokenizer']
  lines.append(
    f'Tokenizer: {tokenizer["kind"]}, {tokenizer["vocab_size"]:,} tokens. Rows of'
    f' {corpus.config.seq_len} tokens, {corpus.config.batch_size} a batch, packed by'
    f' {corpus.config.packing!r}; {summary["long_documents"]:,} documents were longer than a row.'
  )
  bad = summary['read']
  if bad['bad']:
    kinds = ', '.join(f'{n} {kind}' for kind, n in bad['bad_by_kind'].items())
    examples = '\n'.join(f'* `{e}`' for e in bad['examples'])
    lines.append(f'Left out: {bad["bad"]} ({kinds}). Examples:\n\n{examples}')
  else:
    lines.append('No document was left out as unreadable, empty or broken.')
  return '\n\n'.join(lines)


def _reproduce(run: Run) -> str:
  return (
    '## Reproduce\n\n```\n'
    + (run.command or f'python -m experiments.run --workdir={shlex.quote(str(run.path))}')
    + f'\n```\n\nThe whole config is in config.json, every number of the curves in metrics.jsonl; the'
    f' seed is {run.config["seed"]}.'
  )


def _summary(run: Run, train: list[dict[str, Any]]) -> list[str]:
  lines = []
  if run.evaluation:
    compared = ', '.join(
      f'{name} {run.baselines[key]:.3f}'
      for key, name in (('gzip_by_file', 'gzip -9'), ('xz_by_file', 'xz -9'))
      if key in run.baselines
    )
    lines.append(f'held-out: {run.evaluation.bits_per_byte:.3f} bits per byte ({compared})')
  if train:
    speed, work, seconds = _rates(train)
    lines.append(
      f'speed: {speed:,.0f} tokens/s, {work / 1e9:,.1f} model GFLOP/s, {_duration(seconds)} of steps'
    )
  return lines


def _rates(train: list[dict[str, Any]]) -> tuple[float, float, float]:
  """Tokens/s, FLOP/s and seconds over all recorded steps."""
  seconds = sum(r['seconds'] for r in train)
  tokens = sum(r['tokens_per_second'] * r['seconds'] for r in train)
  work = sum(r['flops_per_second'] * r['seconds'] for r in train)
  return tokens / seconds, work / seconds, seconds


def _every(train: list[dict[str, Any]]) -> float:
  """Steps per row."""
  return train[-1]['step'] / len(train)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
  lines = [head, ('---',) * len(head), *rows]
  return '\n'.join(
    '| ' + ' | '.join(str(c).replace('|', '\\|') for c in row) + ' |' for row in lines
  )


def _longest_run_of_ticks(text: str) -> int:
  longest = run = 0
  for char in text:
    run = run + 1 if char == '`' else 0
    longest = max(longest, run)
  return longest


def _number(x: float | None, digits: int = 4) -> str:
  return 'not finite' if x is None or not math.isfinite(x) else f'{x:.{digits}f}'


def _duration(seconds: float) -> str:
  if seconds < 120:
    return f'{seconds:.1f} s'
  return f'{seconds / 60:.1f} min'
