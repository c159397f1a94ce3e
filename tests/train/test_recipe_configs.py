"""The stages' configs have the paper's numbers, fit one another, and build. Nothing is allocated.

Appendix A, sections 2.1 to 2.3 of arXiv 2602.15763 and, where it refers there, arXiv 2508.06471 section
2.4. The numbers are written here anew, in the paper's units.
"""

import itertools
import pathlib

import pytest

from experiments import run
from glm5_jax import config as models
from glm5_jax.train import loop, pipeline
from glm5_jax.train.handover import model_changes, tokenizer_changes
from glm5_jax.train.stages import Stage

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPE = ('pretrain', 'midtrain:32k', 'midtrain:128k', 'midtrain:200k', 'dsa_warmup', 'dsa_sparse')
DENSE, WARMUP, JOINT = Stage(True, False), Stage(False, True), Stage(True, True)


def load(name: str, monkeypatch):
  monkeypatch.chdir(ROOT)
  return run.parse(['run', f'--config=configs/{name}', '--workdir=w'])[0]


@pytest.fixture
def recipe(monkeypatch):
  """Stage -> (config, parts) of the 744B configs, in order."""
  out = {}
  for name in RECIPE:
    file, colon, argument = f'glm5_744b_{name}'.partition(':')
    config = load(f'{file}.py{colon}{argument}', monkeypatch)
    out[name] = config, loop.prepare(config)
  return out


# Stage: row length, tokens, learning rate at start (after warm-up) and end, stage, sparse, rope base.
NUMBERS = {
  'pretrain': (4096, 27e12, 2e-4, 4e-5, DENSE, False, 1e4),
  'midtrain:32k': (32768, 1e12, 4e-5, None, DENSE, False, 1e6),
  'midtrain:128k': (131072, 500e9, None, None, DENSE, False, 1e6),
  'midtrain:200k': (202752, 50e9, None, 1e-5, DENSE, False, 1e6),
  'dsa_warmup': (202752, 14 * 202752 * 1000, 5e-3, 2e-4, WARMUP, False, 1e6),
  'dsa_sparse': (202752, 20e9, 1e-5, 1e-5, JOINT, True, 1e6),
}


@pytest.mark.parametrize('name', RECIPE)
def test_the_papers_numbers(recipe, name):
  config, parts = recipe[name]
  length, tokens, first, last, stage, sparse, theta = NUMBERS[name]
  steps, schedule = config.train.steps, parts.optimizer[1]
  # How experts and attention are computed is no number of the paper's.
  mathematics = parts.model.replace(
    expert_matmul='blocks', expert_capacity=0.0, remat='block',
    attention_chunk_elements=models.glm5().attention_chunk_elements,
  )  # fmt: skip
  assert mathematics == models.glm5(
    rope_theta=theta, sparse_attention=sparse, dtype='bfloat16', remat='block'
  )
  assert parts.data.seq_len == length == parts.plan.seq_len
  # To less than one step of the batch.
  assert parts.plan.tokens_until(steps) == pytest.approx(
    tokens, abs=0.51 * parts.plan.rows * length
  )
  if first:
    assert float(schedule(config.optim.warmup_steps)) == pytest.approx(first, rel=1e-5)
  if last:
    assert float(schedule(steps)) == pytest.approx(last, rel=1e-5)
  assert parts.objective.stage == stage
  assert parts.objective.mtp_steps == 3 and parts.objective.mtp_fraction == 1.0
  assert config.optim.name == 'muon_split' and config.optim.momentum == 0.95
  assert config.optim.weight_decay == (0.0 if name == 'dsa_warmup' else 0.1)
  assert parts.data.packing == ('concat' if name == 'pretrain' else 'best_fit')
  if sparse:
    assert parts.plan.topk == 2048


def test_the_batch_of_pretraining(recipe):
  """16M to 64M tokens over the first 500B, never further from a line than half a micro-batch."""
  config, parts = recipe['pretrain']
  plan = parts.plan
  assert plan.filled(0) * plan.micro_rows * 4096 == 16 * 2**20
  assert plan.rows * 4096 == 64 * 2**20
  warmup = config.train.batch_warmup_steps
  assert plan.tokens_until(warmup) == pytest.approx(500e9, rel=1e-3)
  assert plan.filled(warmup) == plan.micro_batches
  for step in range(0, warmup + 1, 61):
    line = plan.first_rows + (plan.rows - plan.first_rows) * step / warmup
    assert abs(plan.filled(step) * plan.micro_rows - line) <= plan.micro_rows / 2, step
  # It stays so through mid-training, up to whole rows.
  for name in RECIPE[1:4]:
    tokens = recipe[name][1].plan.rows * NUMBERS[name][0]
    assert tokens == pytest.approx(64 * 2**20, rel=0.04), name


def test_the_learning_rates_join(recipe):
  """Warm-up from 0, cosine down to where the line of mid-training begins, which has no step in it."""
  pretrain = recipe['pretrain'][1].optimizer[1]
  assert float(pretrain(0)) == 0.0
  halfway = (recipe['pretrain'][0].train.steps + 2000) // 2
  assert float(pretrain(halfway)) == pytest.approx((2e-4 + 4e-5) / 2, rel=1e-3)
  rate, tokens = 4e-5, 0.0
  for name in RECIPE[1:4]:
    config, parts = recipe[name]
    schedule, steps = parts.optimizer[1], config.train.steps
    assert float(schedule(0)) == pytest.approx(rate, rel=1e-5)
    rate = float(schedule(steps))
    middle = float(schedule(steps // 2))
    assert middle == pytest.approx((float(schedule(0)) + rate) / 2, rel=1e-3)
    # By tokens, it is one line from 4e-5 to 1e-5.
    tokens += NUMBERS[name][1]
    assert rate == pytest.approx(4e-5 - 3e-5 * tokens / 1.55e12, rel=1e-5)
  sparse = recipe['dsa_sparse'][1].optimizer[1]
  assert {float(sparse(s)) for s in (0, 100, 308)} == {float(sparse(0))}


def test_mtp_weight_and_balancing(recipe):
  """0.3 and 0.001 for the first 15T tokens, 0.1 and 0 from there on; 1e-4 throughout."""
  _, parts = recipe['pretrain']
  objective = parts.objective
  assert parts.plan.tokens_until(objective.switch_step) == pytest.approx(15e12, rel=1e-4)
  for step, weight, rate in ((0, 0.3, 1e-3), (227988, 0.3, 1e-3), (227989, 0.1, 0.0)):
    assert float(objective.at('mtp_weight', step)) == pytest.approx(weight)
    assert float(objective.at('router_bias_rate', step)) == pytest.approx(rate)
  for name in ('midtrain:32k', 'midtrain:128k', 'midtrain:200k', 'dsa_sparse'):
    objective = recipe[name][1].objective
    assert (objective.mtp_weight, objective.router_bias_rate, objective.switch_step) == (
      0.1,
      0.0,
      0,
    )
  for config, _ in recipe.values():
    assert config.train.balance_loss_weight == 1e-4


def test_each_stage_takes_over_the_one_before(recipe):
  """The folder that the earlier config's command names, of the same model, with the same tokenizer."""
  names = list(recipe)
  for before, name in itertools.pairwise(names):
    (earlier, earlier_parts), (config, parts) = recipe[before], recipe[name]
    file = f'glm5_744b_{before}'.replace('midtrain:', 'midtrain.py:')
    file = file if ':' in file else f'{file}.py'
    text = (ROOT / 'configs' / file.partition(':')[0]).read_text()
    assert f'--config=configs/{file} --workdir={config.init_from}\n' in text
    assert model_changes(earlier_parts.model, parts.model) == []
    tokenizers = (c.data.tokenizer.to_dict() for c in (earlier, config))
    assert tokenizer_changes(*tokenizers) == []
  assert recipe['pretrain'][0].init_from == ''


def test_an_unknown_part_of_midtraining(monkeypatch):
  with pytest.raises(run.UsageError, match="unknown stage '64k', known are"):
    load('glm5_744b_midtrain.py:64k', monkeypatch)


def test_the_nano_pipeline_is_the_recipe_in_small(monkeypatch):
  config = load('nano_pipeline.py', monkeypatch)
  runs = pipeline.stage_runs(config, pathlib.Path('w').absolute())
  assert [r.name for r in runs] == ['pretrain', 'midtrain', 'dsa_warmup', 'dsa_sparse']
  assert [r.parts.objective.stage for r in runs] == [DENSE, DENSE, WARMUP, JOINT]
  assert [r.parts.model.rope_theta for r in runs] == [1e4, 1e6, 1e6, 1e6]
  assert [r.parts.data.packing for r in runs] == ['concat'] + ['best_fit'] * 3
  assert [r.config['optim']['schedule'] for r in runs] == ['cosine', 'linear', 'linear', 'constant']
  lengths = [r.parts.data.seq_len for r in runs]
  assert lengths[0] < lengths[1] == lengths[2] == lengths[3]
  assert lengths[3] > runs[3].parts.model.index_topk, 'sparse attention must be sparse'
  rates = [[float(r.parts.optimizer[1](s)) for s in (0, r.config['train']['steps'])] for r in runs]
  assert rates[0][1] == pytest.approx(rates[1][0]) and rates[1][1] == pytest.approx(rates[3][0])
  assert rates[2] == pytest.approx([5e-3, 2e-4]) and rates[3][0] == rates[3][1]
  plan = runs[0].parts.plan
  assert plan.filled(0) * plan.micro_rows == 8 and plan.filled(200) * plan.micro_rows == 16
  assert [r.config['init_from'] for r in runs[1:]] == [str(r.folder) for r in runs[:-1]]
  # About 3,500 tokens a second: twelve minutes of steps leave as much for compiling and evaluation.
  assert sum(r.parts.plan.tokens_until(r.config['train']['steps']) for r in runs) < 3500 * 12 * 60


@pytest.mark.parametrize('stage', ['pretrain', 'midtrain', 'dsa_warmup', 'dsa_sparse'])
def test_one_stage_of_it_on_its_own(monkeypatch, stage):
  config = load(f'nano_pipeline.py:{stage}', monkeypatch)
  assert config.stage == stage
  if stage != 'pretrain':
    with pytest.raises(loop.ConfigError, match='set --config.init_from'):
      loop.prepare(config)
    config.init_from = 'somewhere'
  loop.prepare(config)
