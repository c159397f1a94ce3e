"""From episodes to updates: what the engine sampled is what the policy learns from, token for token."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.data import chat
from glm5_jax.data.chat_parse import Reply, ToolCall
from glm5_jax.envs.functions import Functions
from glm5_jax.envs.lookup import Lookup
from glm5_jax.envs.numbers import Calculator, WordProblems
from glm5_jax.envs.protocol import EnvironmentFailureError, sample, tool_message
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.rl import batch, loop, tasks
from glm5_jax.rl.learner import STAGE, Learner, make_policy_step
from glm5_jax.rl.rollout import Job, Settings, Trajectory, play
from glm5_jax.train.prepare import ConfigError
from tests import tiny
from tests.rl import tiny_run
from tests.rl.tiny_run import BYTES, CONFIG

SETTINGS = Settings(max_tokens=300, max_turn_tokens=12, max_turns=3)
SIZES = EngineConfig(
  page_size=16, pages=161, max_length=300, max_sequences=8, max_step_tokens=64,
  prefill_buckets=(48,), batch_buckets=(8,), page_buckets=(19,),
  compiler_options=tuple(tiny.FAST_COMPILE.items()),
)  # fmt: skip
LEARNER = Learner(PolicyConfig('icepop'), micro_rows=2)


@pytest.fixture(scope='module')
def params():
  return tiny.random_params(CONFIG)


@pytest.fixture(scope='module')
def engine(params):
  return Engine(params, CONFIG, BYTES, SIZES)


class Chatty:
  """Answers every reply until its third turn, whatever it says."""

  name = 'chatty'
  tools = ()

  def __init__(self, broken: str = ''):
    self._broken = broken

  def respond(self, task, reply):
    if self._broken == 'respond':
      raise EnvironmentFailureError('it broke')
    return [tool_message('again, é')]

  def reward(self, task, messages):
    if self._broken == 'reward':
      raise EnvironmentFailureError('the judge broke')
    return float(len(messages))


def _jobs(count=6):
  task = sample(WordProblems(), 0, held_out=False)
  return [Job(Chatty(), task, 0, member) for member in range(count)]


def _favouring(params, names):
  """Parameters whose next token is nearly always one of these special ones."""
  head = params['lm_head']
  ids = np.array([BYTES.special_ids[n] for n in names])
  return params | {'final_norm': params['final_norm'] * 0 + 1, 'lm_head': head.at[:, ids].mul(8.0)}


def test_tokens_are_recorded_as_they_were_sampled(engine):
  """Every turn continues from the generated ids; special tokens between turns are the template's."""
  played = play(engine, BYTES, _jobs(), SETTINGS)
  for t in played:
    assert len(t.ids) == len(t.sampled) == len(t.logprobs) == len(t.token_versions)
    prompt = chat.encode(
      chat.render(t.messages[:1], [], form=SETTINGS.form, generation_prompt=True), BYTES
    )
    n = len(prompt.ids)
    assert t.ids[:n] == prompt.ids.tolist() and not any(t.sampled[:n]) and t.sampled[n]
    assert all(lp < 0 if s else lp == 0 for lp, s in zip(t.logprobs, t.sampled, strict=True))
    assert all((v == 0) == s for v, s in zip(t.token_versions, t.sampled, strict=True))
    assert t.versions == [0] and t.end in ('done', 'length')


def test_a_turn_that_asks_for_results_gets_them(params):
  wild = _favouring(params, ['<|observation|>'])
  engine = Engine(wild, CONFIG, BYTES, SIZES)
  played = play(engine, BYTES, _jobs(12), SETTINGS)
  several = [t for t in played if t.turns > 1]
  assert several, [t.turns for t in played]
  between = chat.text_of(chat.continuation([tool_message('again, é')], form=SETTINGS.form))
  assert between == '<tool_response>again, é</tool_response><|assistant|><think>'
  for t in several:
    given = BYTES.decode([i for i, s in zip(t.ids, t.sampled, strict=True) if not s])
    assert given.count(between) == len([m for m in t.messages if m['role'] == 'tool'])
    assert t.reward == len(t.messages)


def test_episodes_do_not_depend_on_their_company(engine):
  together = play(engine, BYTES, _jobs(6), SETTINGS)
  alone = [play(engine, BYTES, [job], SETTINGS)[0] for job in reversed(_jobs(6))][::-1]
  for a, b in zip(together, alone, strict=True):
    assert a.ids == b.ids and a.messages == b.messages
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
  assert len({tuple(t.ids) for t in together}) == 6  # Members of a group differ.


@pytest.mark.parametrize('broken, said', [('respond', 'it broke'), ('reward', 'the judge broke')])
def test_a_broken_environment_is_a_failure_and_no_reward(params, broken, said):
  wild = Engine(_favouring(params, ['<|observation|>']), CONFIG, BYTES, SIZES)
  task = sample(WordProblems(), 0, held_out=False)
  played = play(wild, BYTES, [Job(Chatty(broken), task, 0, m) for m in range(8)], SETTINGS)
  failed = [t for t in played if t.failure]
  assert failed and all(t.failure == said and t.reward == 0 for t in failed)
  if broken == 'reward':
    assert len(failed) == 8


def test_episodes_end_at_their_limits(engine):
  short = dataclasses.replace(SETTINGS, max_tokens=90)
  for t in play(engine, BYTES, _jobs(4), short):
    assert len(t.ids) <= 90


def test_results_that_do_not_fit_end_the_episode(params):
  wild = Engine(_favouring(params, ['<|observation|>']), CONFIG, BYTES, SIZES)
  full = play(wild, BYTES, _jobs(8), SETTINGS)
  most = max(len(t.ids) for t in full) - 1
  cut = play(wild, BYTES, _jobs(8), dataclasses.replace(SETTINGS, max_tokens=most))
  assert all(len(t.ids) <= most for t in cut)
  assert sum(t.end == 'length' for t in cut) > sum(t.end == 'length' for t in full)


def test_dropped_reasoning_is_refused():
  with pytest.raises(ValueError, match='clear_thinking=False'):
    Settings(form=chat.ChatFormat())


def _trajectories(rng, lengths):
  out = []
  for i, n in enumerate(lengths):
    sampled = [False, *(rng.random() < 0.6 for _ in range(n - 2)), True]
    out.append(
      Trajectory(
        'x',
        i,
        0,
        ids=[rng.randrange(200) for _ in range(n)],
        sampled=sampled,
        logprobs=[-5.0 * rng.random() if s else 0.0 for s in sampled],
        token_versions=[0 if s else -1 for s in sampled],
      )
    )
  return out


def test_packed_rows_hold_every_token_once():
  rng = random.Random(0)
  played = _trajectories(rng, [5, 30, 17, 2, 33, 9, 12, 28])
  rows = batch.pack(played, list(range(1, 9)), 32, 3, pad_id=7)
  assert len(rows.tokens) % 3 == 0
  found = []
  for r in range(len(rows.tokens)):
    for segment in range(1, rows.segment_ids[r].max() + 1):
      here = rows.segment_ids[r] == segment
      np.testing.assert_array_equal(rows.positions[r][here], np.arange(here.sum()))
      (t,) = (t for t in played if t.ids[:-1] == rows.tokens[r][here].tolist())
      assert rows.targets[r][here].tolist() == t.ids[1:]
      assert rows.mask[r][here].tolist() == t.sampled[1:]
      np.testing.assert_allclose(rows.rollout[r][here], t.logprobs[1:], atol=1e-6)
      np.testing.assert_array_equal(
        rows.advantages[r][here], (t.index + 1.0) * np.array(t.sampled[1:])
      )
      found.append(t.index)
  assert sorted(found) == list(range(8))
  assert (rows.tokens[rows.segment_ids == 0] == 7).all() and not rows.mask[
    rows.segment_ids == 0
  ].any()
  with pytest.raises(ValueError, match='33 tokens does not fit rows of 31'):
    batch.pack(played, [0.0] * 8, 31, 1, 0)


def _sgd():
  return optax.sgd(1.0)


def test_on_policy_the_trainer_agrees_with_the_engine(engine, params):
  """The log-probabilities of packed rows, recomputed in training, are those of paged decoding."""
  played = play(engine, BYTES, _jobs(6), SETTINGS)
  rows = batch.pack(played, [1.0] * 6, 320, 2, BYTES.eot_id)
  step = make_policy_step(CONFIG, LEARNER, _sgd())
  _, metrics = step(tiny_run.state(params, _sgd()), rows, jnp.int32(len(rows.tokens) // 2))
  assert metrics['logprob_gap_max'] < 1e-5
  np.testing.assert_allclose(metrics['ratio'], 1.0, atol=1e-5)
  assert metrics['masked'] == 0 and metrics['kl_behaviour'] < 1e-8
  assert metrics['tokens'] == sum(t.response_tokens for t in played)


def test_the_update_is_that_of_the_episodes_one_by_one(params):
  """Packing, micro-batches and padding change nothing: SGD's step is the mean of single gradients."""
  rng = random.Random(1)
  played = _trajectories(rng, [6, 14, 21, 9, 18])
  for t in played:  # Near the policy's own, so that icepop keeps them.
    hidden = tiny.forward(params, [t.ids[:-1]], CONFIG)
    logp = jax.nn.log_softmax(hidden.logits[0], axis=-1)[np.arange(len(t.ids) - 1), t.ids[1:]]
    t.logprobs = [0.0, *(np.asarray(logp) * t.sampled[1:] + 0.1 * np.array(t.sampled[1:]))]
  values = [1.0, -0.5, 2.0, 0.3, -1.0]
  learner = dataclasses.replace(LEARNER, policy=PolicyConfig('importance'))
  step = make_policy_step(CONFIG, learner, _sgd())

  def gradient(trajectories, advantages, filled=None):
    rows = batch.pack(trajectories, advantages, 24, 2, 0)
    count = len(rows.tokens) // 2
    extra = ((0, 8 - len(rows.tokens)), (0, 0))
    rows = jax.tree.map(lambda a: np.pad(a, extra), rows)
    state, metrics = step(tiny_run.state(params, _sgd()), rows, jnp.int32(count))
    return jax.tree.map(lambda old, new: np.asarray(old - new), params, state.params), metrics

  whole, metrics = gradient(played, values)
  single = [gradient([t], [a])[0] for t, a in zip(played, values, strict=True)]
  mean = jax.tree.map(lambda *g: sum(g) / 5, *single)
  scale = max(float(np.abs(g).max()) for g in jax.tree.leaves(mean))
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(mean), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6 * max(1.0, scale))
  assert scale > 1e-3 and np.isfinite(metrics['loss'])
  # The indexers are frozen (section 3.2), bit for bit; the rest moves.
  frozen = STAGE.split(whole)[1]
  assert jax.tree.leaves(frozen) and not any(np.any(x) for x in jax.tree.leaves(frozen))


def test_what_was_better_becomes_likelier(params):
  rng = random.Random(2)
  good, bad = _trajectories(rng, [12, 12])
  tx = optax.adam(1e-3)
  learner = dataclasses.replace(LEARNER, policy=PolicyConfig('on_policy'))
  step, state = make_policy_step(CONFIG, learner, tx), tiny_run.state(params, tx)
  rows = batch.pack([good, bad], [1.0, -1.0], 12, 2, 0)

  def logprob(params, t):
    logits = tiny.forward(params, [t.ids[:-1]], CONFIG).logits[0]
    chosen = jax.nn.log_softmax(logits, axis=-1)[np.arange(len(t.ids) - 1), t.ids[1:]]
    return float(np.sum(chosen * np.array(t.sampled[1:])))

  before = [logprob(params, t) for t in (good, bad)]
  for _ in range(5):
    state, _ = step(state, rows, jnp.int32(1))
  after = [logprob(state.params, t) for t in (good, bad)]
  assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


def test_an_update_that_is_not_finite_changes_nothing(params):
  (t,) = _trajectories(random.Random(3), [10])
  rows = batch.pack([t], [float('inf')], 12, 2, 0)
  tx = optax.adam(1e-3)
  state, metrics = make_policy_step(CONFIG, LEARNER, tx)(
    tiny_run.state(params, tx), rows, jnp.int32(1)
  )
  assert metrics['skipped'] == 1 and state.skipped == 1
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_jobs_are_a_function_of_the_step():
  environments = [WordProblems(), Calculator(), Lookup()]
  jobs = tasks.jobs_of_step(environments, 4, 5, 3, seed=0)
  assert [j.env.name for j in jobs[::3]] == ['lookup', 'math', 'tool', 'lookup', 'math']
  assert [j.sample for j in jobs[:3]] == [0, 1, 2] and len({j.task.key for j in jobs[:3]}) == 1
  seen = [j.task.key for s in range(10) for j in tasks.jobs_of_step(environments, s, 5, 1, 0)]
  assert len(set(seen)) >= len(seen) - 2
  held_out = {j.task.key for j in tasks.held_out_jobs(environments, 30, 0)}
  assert not held_out & set(seen)


# --- The loop ---


@pytest.fixture(scope='module')
def trained(tmp_path_factory, params):
  return tiny_run.save(tmp_path_factory.mktemp('before'), params)


@pytest.fixture
def some_rewards(monkeypatch):
  """A random model solves nothing; let the judge like short episodes, or nothing would be learnt."""
  for env in (Functions, WordProblems):
    monkeypatch.setattr(env, 'reward', lambda self, task, messages: float(len(str(messages)) % 2))


def test_a_run_and_its_resumption(trained, tmp_path, some_rewards):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert loop.train(tiny_run.config(trained), str(whole), command='the command') == 0
  config = tiny_run.config(trained)
  config.train.steps = 2
  assert loop.train(config, str(parts)) == 0
  config.train.steps = 4
  assert loop.train(config, str(parts)) == 0
  for step in range(1, 5):
    files = [p / 'rollouts' / f'{step:06d}.jsonl' for p in (whole, parts)]
    assert files[0].read_text() == files[1].read_text()
    episodes = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(episodes) == 8
    assert {v for e in episodes for v in e['token_versions']} == {-1, step - 1}
  rows = [
    [json.loads(line) for line in (p / 'metrics.jsonl').read_text().splitlines()]
    for p in (whole, parts)
  ]
  timing = {'time', 'seconds', 'generation_seconds', 'training_seconds', 'tokens_per_second'}
  plain = [[{k: v for k, v in r.items() if k not in timing} for r in rs] for rs in rows]
  assert plain[0] == plain[1]
  assert max(r.get('logprob_gap_max', 0) for r in rows[0]) < 1e-5
  assert any(r.get('tokens', 0) > 0 for r in rows[0])
  report = (whole / 'report.md').read_text()
  assert 'the command' in report and '| code |' in report
  assert all((whole / 'plots' / f'{n}.png').stat().st_size for n in ('accuracy', 'health'))


@pytest.mark.parametrize(
  'key, value, said',
  [
    ('rl.environments', ('math', 'maths'), "one of ['code', 'lookup', 'math', 'science', 'tool']"),
    ('rl.policy.objective', 'grpo', "unknown policy objective 'grpo'"),
    ('rl.policy.beta', 0.5, 'beta=0.5 must be at least 1'),
    ('rl.group_size', 1, 'nothing to compare'),
    ('rl.advantage', 'best', "'best' is none of"),
    ('rl.advantage', 'teacher', "the advantage of stage 'distill', and of no other"),
    ('stage', 'pretrain', "unknown RL stage 'pretrain'"),
    ('rl.teachers', {'math': 'x'}, 'are for rl.advantage=teacher'),
    ('rl.seq_len', 100, 'max_tokens=448 must fit a row'),
    ('rl.episode.max_tokens', 0, 'max_tokens'),
    ('mesh.fsdp', 2, 'RL runs on one device'),
    ('init_from', '', 'continues a trained model'),
  ],
)
def test_impossible_configs(trained, key, value, said):
  config = tiny_run.config(trained)
  *sections, last = key.split('.')
  section = config
  for name in sections:
    section = section[name]
  section[last] = value
  with pytest.raises(ConfigError) as error:
    loop.prepare(config)
  assert said in str(error.value)


def test_tasks_that_do_not_fit_are_refused_at_the_start(trained, tmp_path):
  config = tiny_run.config(trained)
  config.rl.environments = ('lookup',)  # In bytes, the description of its tool alone is longer.
  with pytest.raises(ConfigError, match=r"'lookup' has \d+ tokens, .* max_tokens=448"):
    loop.train(config, str(tmp_path / 'run'))


def test_a_reply_is_rendered_as_it_was_parsed():
  """The messages of an episode say what its tokens say."""
  reply = Reply('r', '', (ToolCall('get', {'k': 'ab'}),))
  text = chat.text_of(chat.render([{'role': 'user', 'content': 'x'}, reply.message()], close=True))
  assert text.endswith(
    '<think>r</think><tool_call>get<arg_key>k</arg_key><arg_value>ab</arg_value></tool_call>'
    '<|observation|>'
  )
