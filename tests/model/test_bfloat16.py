"""bfloat16 activations against float32, on the golden model.

A bfloat16 operation rounds to 8 significant bits: relative error up to u = 2^-9. A token passes
about 70 roundings one after another (per layer 2 norms, 7 projections and products of attention, 4
of the feed-forward part, 2 residual additions), whose errors are independent: sqrt(70) u = 8 u of
the logits' standard deviation, twice that with the gain of these scaled-up weights. That holds as
long as no choice flips. Scores that lie closer than their rounding error may swap, then another key
or expert is used and the token differs visibly, as it would in any bfloat16 implementation; so the
bound on errors is checked on tokens whose whole history made the same choices, and the flips are
counted.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.modules.block import Options
from tests import tiny

U = 2.0**-9


@pytest.fixture(scope='module')
def runs(plain):
  """(logits, layers) of the float32 reference and in bfloat16."""
  config, reference = plain.config.replace(dtype='bfloat16'), plain.reference
  exact = [{'selected': reference[f'layer{i}.selected']} for i in range(config.num_hidden_layers)]
  for i in range(config.first_k_dense_replace, config.num_hidden_layers):
    exact[i]['router_experts'] = reference[f'layer{i}.router_idx']
  run = tiny.forward(plain.params, plain.ids, config, options=Options(capture=True))
  assert run.logits.dtype == jnp.float32
  assert run.hidden.dtype == run.aux['moe']['block0']['mlp_out'].dtype == jnp.bfloat16
  rounded = tiny.layers(config, run.aux)
  return (reference['logits'], exact), (np.asarray(run.logits, np.float64), rounded)


def same_choices(a, b) -> np.ndarray:
  """[b, t]: the token selected the same keys and experts in this layer."""
  same = (a['selected'] == b['selected']).all(-1)
  if 'router_experts' in a:
    experts = (np.sort(layer['router_experts'], 1) for layer in (a, b))
    same &= np.equal(*experts).all(1).reshape(same.shape)
  return same


def test_error_without_flips(runs):
  (want, exact), (got, rounded) = runs
  unflipped = np.all([same_choices(a, b) for a, b in zip(exact, rounded, strict=True)], axis=0)
  for layer in exact:  # Nor may anything that it attends to have flipped.
    unflipped &= ~(layer['selected'] & ~unflipped[:, None]).any(-1)
  assert unflipped.sum() >= 10
  error = np.sqrt(np.mean((got - want) ** 2, -1)) / want.std() / U
  largest = np.abs(got - want).max(-1) / want.std() / U
  print(f'[max] bf16, {unflipped.sum()} tokens: RMS error {error[unflipped].max():.1f} u, '
        f'largest {largest[unflipped].max():.1f} u; median token of all {np.median(error):.1f} u')  # fmt: skip
  assert error[unflipped].max() < 20
  assert largest[unflipped].max() < 64
  assert np.median(error) < 16  # Most tokens are as good, though something in their past flipped.


def test_choices_agree(runs):
  (_, exact), (_, rounded) = runs
  for i, (a, b) in enumerate(zip(exact, rounded, strict=True)):
    many = a['selected'].sum(-1) == 16
    agree = ((a['selected'] & b['selected']).sum(-1)[many] / 16).mean()
    routed = 1.0
    if 'router_experts' in a:
      experts = (np.sort(layer['router_experts'], 1) for layer in (a, b))
      routed = np.equal(*experts).mean()
    print(f'[max] bf16 layer {i}: selected keys {agree:.1%} the same, experts {routed:.1%}')
    assert agree > 0.92 and routed > 0.9
