"""From a parameter's path to its update rule: one table for each optimizer, exactly one row applies.

A row is a pattern and a rule. The pattern must match a parameter's whole path, or its end after a '/'.
The rule is one of

  frozen           not updated by the optimizer;
  adamw            AdamW with weight decay;
  adamw_no_decay   AdamW without;
  'QNH->N,Q,H'     Muon. Left of the arrow the array's axes (shape glossary), right of it which of them
                   count matrices, which are a matrix's rows, which its columns. Axes in front of
                   those named (layers, stacked for a scan) count matrices too.

An experiment replaces rows: `MUON_SPLIT_RULES | {'attn/w_o': 'NHD->N,H,D'}`.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

Rules = dict[str, str]  # Pattern -> rule.
NOT_MUON = ('frozen', 'adamw', 'adamw_no_decay')

# Section 2.1 splits W_UQ, W_UK and W_UV by head and names no other matrix: all others stay whole, W_O,
# the indexer's and GQA's (the paper's GQA baseline has no split) included. That is our choice.
# GLM-4.5 (arXiv 2508.06471, section 2.4), whose recipe this is, leaves embedding, biases and norms to
# another optimizer. Of the output head it says nothing; as usual with Muon it goes with the embedding.
MUON_SPLIT_RULES: Rules = {
  'embed|lm_head': 'adamw',
  r'\w*norm(_scale|_bias)?': 'adamw_no_decay',
  # The router's correction bias is moved by the balancing rule (ops/router.py), not by a gradient.
  'router/bias': 'frozen',
  'attn/w_uq': 'QNH->N,Q,H',
  'attn/w_u[kv]': 'LNH->N,L,H',
  'attn/w_dq': 'DQ->,D,Q',
  'attn/w_dkv': 'DL->,D,L',  # Latent and rope key are columns of one matrix.
  'attn/w_o': 'NHD->,NH,D',
  'attn/w_q': 'DNH->,D,NH',  # GQA
  'attn/w_[kv]': 'DMH->,D,MH',  # GQA
  'indexer/w_q': 'QIJ->,Q,IJ',
  'indexer/w_k': 'DJ->,D,J',
  'indexer/w_w': 'DI->,D,I',
  'router/w': 'DE->,D,E',
  'experts/w_(gate|up)': 'EDF->E,D,F',
  'experts/w_down': 'EFD->E,F,D',
  '(mlp|shared)/w_(gate|up)': 'DF->,D,F',
  '(mlp|shared)/w_down': 'FD->,F,D',
  'mtp/w_proj': 'CD->,C,D',  # C = 2 D: embedding and hidden state.
}
# GLM-4.5's recipe: the heads of a projection side by side are one matrix.
MUON_RULES: Rules = MUON_SPLIT_RULES | {
  'attn/w_uq': 'QNH->,Q,NH',
  'attn/w_u[kv]': 'LNH->,L,NH',
}
ADAMW_RULES: Rules = {p: 'adamw' if '->' in rule else rule for p, rule in MUON_RULES.items()}
TABLES: Mapping[str, Rules] = {
  'muon_split': MUON_SPLIT_RULES,
  'muon': MUON_RULES,
  'adamw': ADAMW_RULES,
}


class Layout(NamedTuple):
  """Which axes of an array count matrices, which are their rows, and which their columns."""

  batch: tuple[int, ...]
  rows: tuple[int, ...]
  cols: tuple[int, ...]

  def matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(number of matrices, rows, columns) of an array of this shape."""
    count, rows, cols = (math.prod(shape[i] for i in axes) for axes in self)
    return count, rows, cols


def parse_layout(rule: str, ndim: int) -> Layout:
  """The axes that 'QNH->N,Q,H' means in an array of `ndim` axes.

  Raises:
    ValueError: the rule is malformed, or names more axes than there are.
  """
  left, arrow, right = rule.partition('->')
  parts = right.split(',')
  well_formed = arrow and len(parts) == 3 and parts[1] and parts[2]
  if not well_formed or len(set(left)) < len(left) or sorted(left) != sorted(''.join(parts)):
    raise ValueError(
      f'{rule!r} is no rule: expected one of {list(NOT_MUON)}, or AXES->MATRICES,ROWS,COLUMNS such'
      " as 'QNH->N,Q,H', every axis once on either side"
    )
  first = ndim - len(left)
  if first < 0:
    raise ValueError(f'{rule!r} names {len(left)} axes; the array has {ndim}')
  batch, rows, cols = (tuple(first + left.index(axis) for axis in part) for part in parts)
  return Layout((*range(first), *batch), rows, cols)


def rule_of(path: str, rules: Rules) -> str:
  """The rule of the parameter at `path` ('moe/block0/attn/w_uq').

  Raises:
    ValueError: unless exactly one row applies.
  """
  found = [(p, rule) for p, rule in rules.items() if re.fullmatch(rf'(.*/)?({p})', path)]
  if len(found) != 1:
    rows = f'several optimizer rules match ({[p for p, _ in found]})' if found else 'no optimizer rule matches'  # fmt: skip
    raise ValueError(f'{rows} parameter {path!r}')
  return found[0][1]


def label_params(params: Any, rules: Rules) -> Any:
  """The tree of rules of a tree of parameters. Raises ValueError as `rule_of`."""
  return jax.tree_util.tree_map_with_path(lambda path, _: rule_of(path_name(path), rules), params)


def layouts(params: Any, rules: Rules) -> list[Layout]:
  """The layouts of a tree's leaves, in their order; all of them must be Muon's.

  Raises:
    ValueError: as `rule_of` and `parse_layout`.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [parse_layout(rule_of(path_name(path), rules), len(x.shape)) for path, x in leaves]


def path_name(path: tuple[Any, ...]) -> str:
  """A key path of jax.tree_util as 'moe/block0/attn/w_uq'."""
  return '/'.join(str(key.key) for key in path)
