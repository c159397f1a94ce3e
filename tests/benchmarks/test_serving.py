"""The serving benchmark at toy size: what it counts, and that it notices what it is there to notice."""

import numpy as np
import pytest

from benchmarks.serving import decoding, load, peer, runs
from glm5_jax.infer.cache import pages_for
from tests import tiny
from tests.infer import serving

FAST = tuple(tiny.FAST_COMPILE.items())
CONFIG = tiny.config(first_k_dense_replace=0)


@pytest.fixture(scope='module')
def model() -> runs.Model:
  config = CONFIG.replace(num_nextn_predict_layers=1)
  return runs.Model(config, tiny.random_params(config))


def test_sparse_and_dense_decoding(model):
  result = decoding.attention(model, [70, 130], 2, 2, 1, FAST)
  assert [row['context'] for row in result['rows']] == [70, 130]
  assert all(row['ratio'] == row['sparse'] / row['dense'] > 0 for row in result['rows'])
  assert decoding.attention_table(result).count('\n') == 3


def test_drafts_change_no_answer(model):
  sizes = {'compiler_options': FAST}
  result = decoding.drafting(model, (2,), 2, 12, 6, 1, 1.0, **sizes)
  plain, drafted = result['rows']
  assert (plain['drafts'], plain['accept_length'], drafted['drafts']) == (0, 1.0, 2)
  assert 1 <= drafted['accept_length'] <= 3 and drafted['same'] == plain['same'] == 2
  assert '2 of 2' in decoding.drafting_table(result)


def test_a_conversation_prefills_its_new_tokens_only(model):
  said, new, talks = 70, 6, 2
  result = decoding.prefix(
    model, talks, 3, said, new, 1, prefill_buckets=(128,), page_buckets=(4,), max_step_tokens=200,
    compiler_options=FAST,
  )  # fmt: skip
  for i, row in enumerate(result['rows']):
    whole = i * (said + new) + said
    # The last token of an answer was never computed.
    known = decoding.PAGE * ((i * (said + new) - 1) // decoding.PAGE) if i else 0
    assert row['anew_tokens'] == talks * whole
    assert row['kept_tokens'] == talks * (whole - known)
    assert 0 < row['kept_first'] <= row['kept_seconds']
  assert decoding.prefix_table(result).splitlines()[-1].startswith('| all | ')


@pytest.fixture(scope='module')
def live():
  engine = serving.tiny_engine()
  # The text of an answer comes from the engine's tokenizer.
  engine._tokenizer = load.Letters()
  with serving.running(engine) as live:
    yield live
    live.check_healthy()


def test_load(live):
  result = load.levels(live.port, 250, [(1, 2), (3, 7)], (2, 20), (2, 5), 300.0)
  assert [(r['clients'], r['requests'], r['lost']) for r in result['rows']] == [
    (1, 2, 0),
    (3, 7, 0),
  ]
  assert all(0 < r['first_p50'] <= r['first_p95'] for r in result['rows'])
  assert not load.wrong(result), result
  assert load.table(result).count('\n') == 3
  lost = result | {'rows': [result['rows'][0] | {'lost': 1, 'wrong': ['gone']}]}
  assert 'gone' in load.wrong(lost)
  kept = result | {'end': result['end'] | {'pages_used': result['end']['pages_cached'] + 1}}
  assert 'still holds' in load.wrong(kept)


class Fewer(load.Ask):
  """Asks for a token less than it expects."""

  def body(self) -> bytes:
    return load.Ask(self.prompt, self.new - 1, self.seed).body()


@pytest.mark.parametrize(
  'made, wrong', [(Fewer([1, 2], 4, 0), '3 tokens'), (load.Ask([-1], 4, 0), 'status 400')]
)
def test_what_is_not_whole_counts_as_lost(live, made, wrong):
  answers, seconds = load.drive(live.port, [load.Ask([1, 2], 4, 0), made], 1, 300.0)
  found = load.summary(answers, seconds, 1)
  assert found['lost'] == 1 and wrong in found['wrong'][0]
  assert len(answers[0].times) == 4 and answers[0].times == sorted(answers[0].times)


def test_the_engines_side_against_the_peer(tmp_path, monkeypatch):
  monkeypatch.setattr(peer, 'CONFIG', CONFIG)
  peer.prepare(tmp_path)
  tasks = [peer.Task(1, 20, 5), peer.Task(3, 20, 5)]
  side = peer.ours(tmp_path, tasks, compiler_options=FAST)
  params = runs.random_model(CONFIG).params
  for task in tasks:
    ids = side(task)
    for prompt, answer in zip(task.prompts(), ids, strict=True):
      logits = tiny.forward(params, [[*prompt, *answer]], CONFIG).logits[0, 19:-1]
      assert np.argmax(logits, axis=-1).tolist() == answer
  other = [[*ids[0][:3], (ids[0][3] + 1) % 60, ids[0][4]], *ids[1:]]
  found = peer._agreement(tmp_path, tasks[1], ids, other)
  assert (found['same_answers'], found['same_tokens']) == (2, 3 + 5 + 5)
  row = tiny.forward(params, [[*tasks[1].prompts()[0], *ids[0]]], CONFIG).logits[0, 22]
  assert found['largest_gap'] == pytest.approx(float(row[ids[0][3]] - row[other[0][3]]), abs=1e-5)
  assert peer._agreement(tmp_path, tasks[1], ids, ids)['largest_gap'] == 0


def test_a_wrong_peer_is_noticed():
  row = {'batch': 1, 'side': 'x', 'largest_gap': 0.5}
  assert peer.wrong({'rows': [row]}) and not peer.wrong({'rows': [row | {'largest_gap': 1e-6}]})


def test_a_close_choice_is_found(tmp_path, monkeypatch):
  """`_margin` is the distance of the last chosen from the first that is not."""
  assert peer._margin(np.array([[4.0, 1.0, 3.0, 2.5]]), 2) == 0.5
  monkeypatch.setattr(peer, 'CONFIG', CONFIG)
  peer.prepare(tmp_path)
  margin = peer.logit_gap(tmp_path, peer.Task(1, 40, 1).prompts()[0], 1, 2)[1]
  assert 0 <= margin < 1


def test_prompts_of_a_trained_model_are_text():
  tokenizer = load.ByteTokenizer()
  model = runs.Model(CONFIG, None, tokenizer)
  texts = decoding.texts(model, 3, 50)
  assert [len(t) for t in texts] == [50] * 3 and texts[0] != texts[1]
  assert tokenizer.decode(texts[0]).isprintable() or '\n' in tokenizer.decode(texts[0])
  assert pages_for(50, decoding.PAGE) == 1
