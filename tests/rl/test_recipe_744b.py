"""The post-training configs at 744B: the paper's numbers, and that they fit the stages before and build.

Sections 2.4, 3.1 and 3.2 of arXiv 2602.15763, written here anew.
"""

import pathlib

import jax
import pytest

from experiments import run
from glm5_jax import config as models
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim.rules import path_name
from glm5_jax.rl import loop as rl_loop
from glm5_jax.train import loop
from glm5_jax.train.handover import model_changes, tokenizer_changes
from glm5_jax.train.stages import Stage

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch):
  monkeypatch.chdir(ROOT)
  return lambda name: run.parse(['run', f'--config=configs/{name}.py', '--workdir=w'])[0]


def test_sft(load):
  config = load('glm5_744b_sft')
  parts = loop.prepare(config)
  assert parts.model == models.glm5(dtype='bfloat16', remat='block')
  assert parts.model.sparse_attention and parts.model.index_topk == 2048
  assert parts.objective.stage == Stage(True, True)
  assert parts.data.seq_len == 202752
  sources = {s.name: s for s in parts.data.sources}
  assert sources.keys() == {'chat', 'reasoning', 'agents'}
  assert all(s.kind == 'chat' for s in sources.values())
  # Preserved thinking for agents; elsewhere past reasoning is dropped, as users' conversations have it.
  assert [sources[n].clear_thinking for n in ('chat', 'reasoning', 'agents')] == [True, True, False]
  assert parts.plan.tokens_until(config.train.steps) == pytest.approx(13.0e9, rel=1e-2)
  schedule = parts.optimizer[1]
  assert [float(schedule(s)) for s in (0, 50, 1000)] == pytest.approx([0.0, 1e-5, 1e-6])
  # INT4 holds every expert of every MoE layer and of MTP, and nothing else.
  state = jax.eval_shape(parts.optimizer[0].init, abstract_params(parts.model))
  masters = jax.tree_util.tree_leaves_with_path(state.masters)
  experts = 256 * 3 * 6144 * 2048
  assert sum(x.size for _, x in masters) == 76 * experts
  assert all('/experts/' in path_name(path) for path, _ in masters)


def test_reasoning_rl(load):
  config = load('glm5_744b_reasoning_rl')
  parts = rl_loop.prepare(config)
  assert parts.model == models.glm5(dtype='bfloat16', remat='block')
  assert (config.rl.groups, config.rl.group_size) == (32, 32)
  policy = parts.learner.policy
  assert (policy.objective, policy.beta, policy.eps_low, policy.eps_high) == (
    'icepop',
    2,
    0.2,
    0.28,
  )
  assert parts.learner.per == 'sequence' and config.rl.advantage == 'group_normalised'
  assert [e.name for e in parts.environments] == ['math', 'science', 'code', 'tool']
  assert config.rl.groups % len(parts.environments) == 0, 'equal parts in every batch'
  assert parts.trains == 'everything but indexers'
  assert parts.play.settings.max_tokens == config.rl.seq_len == 202752
  sizes = parts.play.engine.resolve(parts.model)
  assert sizes.max_length == 202752 and max(sizes.page_buckets) * sizes.page_size >= 202752
  with pytest.raises(AttributeError):
    config.rl.policy.kl_weight  # noqa: B018 (section 3.2 removes the KL term, and so there is none)


@pytest.mark.parametrize(
  'before, name',
  [('glm5_744b_dsa_sparse', 'glm5_744b_sft'), ('glm5_744b_sft', 'glm5_744b_reasoning_rl')],
)
def test_each_stage_takes_over_the_one_before(load, before, name):
  earlier, config = load(before), load(name)
  text = (ROOT / 'configs' / f'{before}.py').read_text()
  assert f'--config=configs/{before}.py --workdir={config.init_from}\n' in text
  found = [(rl_loop if 'rl' in c else loop).prepare(c).model for c in (earlier, config)]
  assert model_changes(*found) == []
  assert tokenizer_changes(*(c.data.tokenizer.to_dict() for c in (earlier, config))) == []
