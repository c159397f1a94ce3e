"""Mixture-of-experts computation: only chosen experts, nothing dropped, any load and any batch."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from glm5_jax.ops import dispatch
from glm5_jax.ops.router import Routing
from tests import oracle, tiny

D, F, E, K = 12, 10, 6, 2


def weights(seed=0, experts=E):
  rng = np.random.default_rng(seed)
  shapes = {'w_gate': (experts, D, F), 'w_up': (experts, D, F), 'w_down': (experts, F, D)}
  return {k: rng.standard_normal(s).astype('f4') * 0.5 for k, s in shapes.items()}


def ffn(x, experts, router_weights, w):
  unused = jnp.zeros((len(x), E))
  return dispatch.expert_ffn(x, Routing(experts, router_weights, unused, unused), **w)


run = tiny.fast_jit(ffn)
gradients = tiny.fast_jit(
  jax.grad(lambda x, e, r, w, g: jnp.sum(ffn(x, e, r, w) * g), argnums=(0, 2, 3))
)


def every_expert(x, experts, router_weights, w):
  """The definition, dense: every expert on every token, weighted by 0 where it was not chosen."""
  out = 0.0
  for e in range(w['w_gate'].shape[0]):
    weight = jnp.sum(jnp.where(experts == e, router_weights, 0), axis=1, keepdims=True)
    h = jax.nn.silu(x @ w['w_gate'][e]) * (x @ w['w_up'][e])
    out = out + weight * (h @ w['w_down'][e])
  return out


def choices(kind: str, tokens: int, rng) -> np.ndarray:
  """[tokens, K] different experts each, in any order."""
  if kind == 'random':
    return np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype('i4')
  if kind == 'one gets all':  # Expert 3 is everyone's; 0 and 1 get nothing.
    return np.stack(
      [[3, e] if t % 2 else [e, 3] for t, e in enumerate(rng.choice([2, 4, 5], tokens))]
    )
  if kind == 'two get all':  # Four experts get no token.
    return np.tile(np.array([E - 1, 0], 'i4'), (tokens, 1))
  raise ValueError(kind)


@pytest.mark.parametrize('kind', ['random', 'one gets all', 'two get all'])
@pytest.mark.parametrize('tokens', [1, 2, 7, 64, 333])
def test_equals_every_expert_computed(kind, tokens):
  rng = np.random.default_rng(tokens)
  x = rng.standard_normal((tokens, D)).astype('f4')
  experts = choices(kind, tokens, rng)
  r = rng.random((tokens, K)).astype('f4')
  w = weights()
  w64 = {k: v.astype('f8') for k, v in w.items()}
  want = sum(
    np.where(experts == e, r, 0).sum(1, keepdims=True)
    * oracle.swiglu(x.astype('f8'), *(w64[f'w_{p}'][e].T for p in ('gate', 'up', 'down')))
    for e in range(E)
  )
  tiny.close('expert outputs', run(x, experts, r, w), want, 1e-5)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.permutations(range(E)), min_size=33, max_size=33))
def test_any_load_fits(order):
  """33 tokens, any choice: dropping even one pair would be seen, since all outputs are far from 0."""
  experts = np.array(order, 'i4')[:, :K]
  x, r = np.ones((33, D), 'f4'), np.ones((33, K), 'f4')
  w = {'w_gate': np.full((E, D, F), 0.1, 'f4'), 'w_up': np.full((E, D, F), 0.1, 'f4')}
  w['w_down'] = np.tile(np.arange(1, E + 1, dtype='f4')[:, None, None], (1, F, D)) / F
  one = float(oracle.swiglu(*(np.array([[v]]) for v in (1.2, 1.0, 1.0, 1.0)))[0, 0])
  want = one * (experts + 1).sum(1)
  np.testing.assert_allclose(run(x, experts, r, w), want[:, None] * np.ones(D), rtol=1e-5)


@pytest.mark.parametrize('kind', ['random', 'one gets all'])
def test_gradients(kind):
  """Of tokens, router weights and experts; an expert without tokens gets exactly zero."""
  rng = np.random.default_rng(9)
  tokens = 90
  x, g = (rng.standard_normal((tokens, D)).astype('f4') for _ in range(2))
  r, experts, w = rng.random((tokens, K)).astype('f4'), choices(kind, tokens, rng), weights()
  got = gradients(x, experts, r, w, g)
  dense = jax.grad(lambda x, r, w: jnp.sum(every_expert(x, experts, r, w) * g), argnums=(0, 1, 2))
  want = tiny.fast_jit(dense)(x, r, w)
  for path, value in jax.tree_util.tree_leaves_with_path(got):
    reference = dict(jax.tree_util.tree_leaves_with_path(want))[path]
    tiny.close_relative(f'gradient {jax.tree_util.keystr(path)}', value, reference, 2e-6)
  for e in set(range(E)) - set(experts.ravel().tolist()):
    assert not any(np.asarray(got[2][name][e]).any() for name in w)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(rows=st.integers(1, 10**6), experts=st.integers(1, 300), data=st.data())
def test_blocks_suffice_for_any_load(rows, experts, data):
  """sum ceil(n_e / block) never exceeds the static number of blocks."""
  block, blocks = dispatch.block_layout(rows, experts)
  assert blocks * block >= rows
  busiest = data.draw(st.integers(1, experts))
  counts = np.zeros(experts, np.int64)
  # The worst load: as many experts as possible hold one token more than whole blocks.
  counts[:busiest] = 1 if busiest <= rows else 0
  rest = rows - counts.sum()
  counts[data.draw(st.integers(0, experts - 1))] += rest
  assert np.ceil(counts / block).sum() <= blocks
  assert blocks * block <= rows + experts * (block - 1)  # The waste: a block an expert at most.


def compiled(f, tokens: int, chosen: int, experts: int, d: int, f_dim: int):
  """FLOPs that XLA counts in the compiled `f`, and 2 * 3 * D * F: one token in one expert."""
  shape = jax.ShapeDtypeStruct
  w = {'w_gate': (experts, d, f_dim), 'w_up': (experts, d, f_dim), 'w_down': (experts, f_dim, d)}
  arguments = (
    shape((tokens, d), 'f4'), shape((tokens, chosen), 'i4'), shape((tokens, chosen), 'f4'),
    {k: shape(s, 'f4') for k, s in w.items()},
  )  # fmt: skip
  analysis = tiny.fast_jit(f).lower(*arguments).compile().cost_analysis()
  return analysis['flops'], 2 * 3 * d * f_dim


@pytest.mark.parametrize('tokens', [1, 16, 512])
def test_compiled_flops_are_those_of_the_chosen_experts(tokens):
  """2 * 3 * D * F a token and choice, and the padding of at most one block an expert; 32 experts of
  which each token chooses 4: computing all of them would be 8 times as much.
  """
  experts, chosen = 32, 4
  rows = tokens * chosen
  block, blocks = dispatch.block_layout(rows, experts)
  assert blocks * block <= rows + experts * (block - 1) <= 1.25 * rows
  counted, one = compiled(ffn, tokens, chosen, experts, 256, 192)
  print(f'[flops] {tokens} tokens: {counted / one / rows:.3f} of the chosen experts, of which padding'
        f' {blocks * block / rows:.3f}; every expert would be {experts / chosen}')  # fmt: skip
  # The rest is activation, counting and combining: a few hundredths.
  assert one * rows <= counted <= 1.05 * one * blocks * block


@pytest.mark.parametrize(('tokens', 'chosen', 'experts'), [(4096, 2, 8), (512, 4, 128)])
def test_compiled_flops_of_the_gradients(tokens, chosen, experts):
  """Twice the forward pass again, for few experts and for many."""
  block, blocks = dispatch.block_layout(tokens * chosen, experts)
  everything = jax.value_and_grad(lambda x, e, r, w: jnp.sum(ffn(x, e, r, w) ** 2), (0, 2, 3))
  counted, one = compiled(everything, tokens, chosen, experts, 192, 128)
  closed = 3 * one * blocks * block
  print(f'[flops] forward and backward: {counted / closed:.3f} of the closed form with padding')
  # The rest is activation, combining, and adding up the blocks' gradients.
  assert 0.99 * closed <= counted <= 1.15 * closed
