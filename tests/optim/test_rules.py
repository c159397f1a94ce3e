"""The tables: every parameter of every model has exactly one rule, and the rules mean what they say."""

import functools
import re

import jax
import pytest

from glm5_jax import config as configs
from glm5_jax.convert.hf_map import flatten
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim import rules
from glm5_jax.optim.rules import MUON_RULES, MUON_SPLIT_RULES, TABLES

MODELS = {
  'nano': configs.nano(), 'glm5': configs.glm5(), 'glm5_2': configs.glm5_2(),
  'deepseek_v32': configs.deepseek_v32(), 'gqa': configs.nano(attention='gqa'),
}  # fmt: skip


@functools.cache
def _params(model: str):
  return abstract_params(MODELS[model])


def _matching(path: str, table: rules.Rules) -> list[str]:
  """The rows that apply, found the slow way: whole path, or what follows any of its slashes."""
  parts = path.split('/')
  tails = ['/'.join(parts[i:]) for i in range(len(parts))]
  return [p for p in table if any(re.fullmatch(p, tail) for tail in tails)]


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('name', TABLES)
def test_every_parameter_has_exactly_one_rule(name, model):
  params = flatten(_params(model))
  labels = flatten(rules.label_params(_params(model), TABLES[name]))
  assert labels.keys() == params.keys()
  for path, rule in labels.items():
    (row,) = _matching(path, TABLES[name])
    assert rule == TABLES[name][row]
    shape = params[path].shape
    line = f'{name:10} {path:40} {shape!s:22} {rule}'
    if '->' in rule:
      count, rows, cols = rules.parse_layout(rule, len(shape)).matrices(shape)
      assert count * rows * cols == params[path].size and min(rows, cols) > 1
      line += f': {count} of {rows} x {cols}'
    else:
      assert rule in rules.NOT_MUON
    print(line)


def test_no_row_is_dead():
  paths = {p for model in MODELS for p in flatten(_params(model))}
  used = {row for path in paths for row in _matching(path, MUON_SPLIT_RULES)}
  assert used == set(MUON_SPLIT_RULES)


def test_what_is_no_matrix_is_not_muons():
  for name in ('muon', 'muon_split'):
    labels = flatten(rules.label_params(_params('glm5'), TABLES[name]))
    others = {path.rpartition('/')[2] for path, rule in labels.items() if '->' not in rule}
    assert {o for o in others if 'norm' not in o} == {'embed', 'lm_head', 'bias'}


def test_matrices_of_glm5():
  """Heads of W_UQ, W_UK, W_UV: 64 of 2048 x 256, 512 x 192 and 512 x 256 in each of 75 layers."""
  params = flatten(_params('glm5'))

  def matrices(table, path):
    shape = params[path].shape
    return rules.parse_layout(rules.rule_of(path, table), len(shape)).matrices(shape)

  split = {
    'moe/block0/attn/w_uq': (75 * 64, 2048, 256), 'moe/block0/attn/w_uk': (75 * 64, 512, 192),
    'moe/block0/attn/w_uv': (75 * 64, 512, 256), 'mtp/block/attn/w_uk': (64, 512, 192),
    'moe/block0/attn/w_o': (75, 16384, 6144), 'dense/block0/attn/w_dkv': (3, 6144, 576),
    'moe/block0/moe/experts/w_down': (75 * 256, 2048, 6144), 'mtp/w_proj': (1, 12288, 6144),
    'moe/block0/attn/indexer/w_q': (75, 2048, 4096), 'moe/block0/moe/router/w': (75, 6144, 256),
  }  # fmt: skip
  assert {path: matrices(MUON_SPLIT_RULES, path) for path in split} == split
  whole = split | {
    'moe/block0/attn/w_uq': (75, 2048, 16384), 'moe/block0/attn/w_uk': (75, 512, 12288),
    'moe/block0/attn/w_uv': (75, 512, 16384), 'mtp/block/attn/w_uk': (1, 512, 12288),
  }  # fmt: skip
  assert {path: matrices(MUON_RULES, path) for path in whole} == whole


def test_which_axes_a_rule_means():
  assert rules.parse_layout('QNH->N,Q,H', 4) == ((0, 2), (1,), (3,))
  assert rules.parse_layout('QNH->,Q,NH', 3) == ((), (0,), (1, 2))
  assert rules.parse_layout('NHD->,NH,D', 4) == ((0,), (1, 2), (3,))


@pytest.mark.parametrize(
  'rule', ['adam', 'QNH->N,Q', 'QNH->N,Q,', 'QNH->N,,QH', 'QNH->N,Q,D', 'QNH->N,Q,HH', 'QQH->Q,Q,H']
)
def test_malformed_rules(rule):
  with pytest.raises(ValueError, match=f'{rule!r} is no rule: expected one of'):
    rules.parse_layout(rule, 4)


def test_errors_name_the_parameter():
  tree = {'attn': {'w_uq': jax.ShapeDtypeStruct((12, 7), 'float32')}}
  with pytest.raises(ValueError, match="no optimizer rule matches parameter 'attn/w_x'"):
    rules.label_params({'attn': {'w_x': 0}}, MUON_SPLIT_RULES)
  twice = MUON_SPLIT_RULES | {'attn/.*': 'adamw'}
  with pytest.raises(
    ValueError, match=r"several .*'attn/w_uq', 'attn/\.\*'.* parameter 'attn/w_uq'"
  ):
    rules.label_params(tree, twice)
  with pytest.raises(ValueError, match="'QNH->N,Q,H' names 3 axes; the array has 2"):
    rules.layouts(tree, MUON_SPLIT_RULES)
