"""Conversations as training data: which tokens are learnt, what is reported, how rows are made."""

import json

import numpy as np
import pytest

from glm5_jax import data
from glm5_jax.data import conversations
from glm5_jax.data.chat import ChatError
from glm5_jax.data.config import DataConfig, SourceConfig
from glm5_jax.data.report import DataError
from glm5_jax.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
PRESERVED = SourceConfig('chat', 'unused')
CLEARED = SourceConfig('chat', 'unused', clear_thinking=True)


def _turn(question, reasoning, answer, **extra):
  return [
    {'role': 'user', 'content': question},
    {'role': 'assistant', 'content': answer, 'reasoning_content': reasoning, **extra},
  ]


TWO = [*_turn('q1', 'r1', 'a1'), *_turn('q2', 'r2', 'a2')]


def _learnt(record, source):
  """Text and learnt text of each sample."""
  out = []
  for sample in conversations.samples(json.dumps(record), source):
    ids, learnt = sample.encode(BYTES)
    assert len(BYTES.decode(ids[learnt]).encode()) == sample.num_bytes
    out.append((BYTES.decode(ids), BYTES.decode(ids[learnt])))
  return out


def test_preserved_thinking_learns_every_turn_at_once():
  text = (
    '[gMASK]<sop><|user|>q1<|assistant|><think>r1</think>a1<|user|>q2<|assistant|><think>r2'
    '</think>a2<|user|>'
  )
  assert _learnt({'messages': TWO}, PRESERVED) == [
    (text, 'r1</think>a1<|user|>r2</think>a2<|user|>')
  ]


def test_cleared_thinking_learns_each_turn_with_the_history_it_will_see():
  assert _learnt({'messages': TWO}, CLEARED) == [
    (
      '[gMASK]<sop><|user|>q1<|assistant|><think>r1</think>a1<|user|>',
      'r1</think>a1<|user|>',
    ),
    (
      '[gMASK]<sop><|user|>q1<|assistant|></think>a1<|user|>q2<|assistant|><think>r2</think>a2<|user|>',
      'r2</think>a2<|user|>',
    ),
  ]


@pytest.mark.parametrize('source', [PRESERVED, CLEARED])
def test_a_mistake_is_context_and_not_learnt(source):
  messages = [*_turn('q1', 'r1', 'wrong', weight=0), *_turn('q2', 'r2', 'right')]
  (sample,) = _learnt({'messages': messages}, source)
  assert 'wrong' in sample[0]
  assert sample[1] == 'r2</think>right<|user|>'


@pytest.mark.parametrize(
  'record, said',
  [
    ({'text': 'x'}, "must be lists; keys: ['text']"),
    ({'messages': TWO[:1]}, 'no assistant message'),
    ({'messages': [*_turn('q', 'r', 'a', weight=0)]}, 'no assistant message'),
    ({'messages': [*_turn('q', 'r', 'a', weight=0.5)]}, 'message 1: weight must be 0 or 1'),
    ({'messages': [{'role': 'x'}]}, 'message 0: role'),
    ({'messages': TWO, 'tools': {}}, 'must be lists'),
  ],
)
def test_malformed_records(record, said):
  with pytest.raises(ChatError) as error:
    conversations.samples(json.dumps(record), PRESERVED)
  assert said in str(error.value)


def _config(tmp_path, lines, **changes):
  path = tmp_path / 'chat.jsonl'
  path.write_text('\n'.join(lines) + '\n')
  source = SourceConfig('chat', str(path), clear_thinking=changes.pop('clear_thinking', False))
  values = {
    'sources': (source,), 'tokenizer': data.TokenizerConfig('byte'), 'seq_len': 96, 'batch_size': 2,
    'packing': 'best_fit', 'validation_fraction': 0.3, 'cache_dir': str(tmp_path / 'cache'),
    'prefetch': 0,
  }  # fmt: skip
  return DataConfig(**values | changes)


def _lines(count):
  return [
    json.dumps({'messages': [*_turn(f'q{i}', f'r{i}', f'a{i}'), *_turn('again', 'hm', f'b{i}')]})
    for i in range(count)
  ]


@pytest.mark.parametrize('clear', [False, True])
def test_rows_learn_what_the_model_writes_and_nothing_else(tmp_path, clear):
  """Every learnt token of every conversation is a target of weight 1 exactly once an epoch."""
  config = _config(tmp_path, _lines(30), clear_thinking=clear, validation_fraction=0)
  for _ in range(2):  # The second time from the cache.
    corpus = data.load_corpus(config)
    batches = data.make_train_iterator(corpus)
    (rows,) = batches.rows_per_epoch.values()
    found = []
    for _ in range(rows // 2):
      batch = next(batches)
      for r in range(2):
        for segment in range(1, batch['segment_ids'][r].max() + 1):
          here = batch['segment_ids'][r] == segment
          inputs, targets = batch['tokens'][r][here], batch['targets'][r][here]
          weights = batch['weights'][r][here]
          assert BYTES.decode(inputs).startswith('[gMASK]<sop><|user|>')
          np.testing.assert_array_equal(inputs[1:], targets[:-1])
          assert weights[-1] == 0  # What follows is another conversation.
          found.append(BYTES.decode(targets[weights > 0]))
    if clear:
      wanted = [f'r{i}</think>a{i}<|user|>' for i in range(30)]
      wanted += [f'hm</think>b{i}<|user|>' for i in range(30)]
    else:
      wanted = [f'r{i}</think>a{i}<|user|>hm</think>b{i}<|user|>' for i in range(30)]
    missing = [text for text in wanted if text not in found]
    assert len(missing) <= rows % 2 * 4 and set(found) <= set(wanted)
    (part,) = corpus.train
    assert part.num_targets == sum(len(BYTES.encode(t, allow_special=True)) for t in wanted)
    assert part.num_bytes == sum(map(len, wanted))


def test_held_out_conversations(tmp_path):
  corpus = data.load_corpus(_config(tmp_path, _lines(40)))
  held_out = data.make_eval_batches(corpus)
  weights = sum(batch['weights'].sum() for batch in held_out.batches)
  assert weights == held_out.num_targets > 0
  assert 0 < held_out.num_documents < 40
  assert data.held_out_texts(corpus) == []


def test_bad_lines_are_counted_with_file_and_line(tmp_path):
  lines = [*_lines(5), '{"messages": [{"role": "user"}', '{"messages": 3}', *_lines(3)]
  corpus = data.load_corpus(_config(tmp_path, lines, validation_fraction=0))
  assert corpus.report.documents == 8
  assert dict(corpus.report.counts) == {'broken_json': 1, 'bad_chat': 1}
  assert any('chat.jsonl:7: is not a well-formed' in e for e in corpus.report.examples)
  with pytest.raises(DataError, match=r'chat\.jsonl:6'):
    data.load_corpus(_config(tmp_path, lines, on_bad='fatal', cache_dir=''))


def test_infilling_needs_texts(tmp_path):
  with pytest.raises(DataError, match="'chat' source needs 'next_token'"):
    _config(tmp_path, _lines(2), objective='infilling')
