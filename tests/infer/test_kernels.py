"""The engine that decodes by the TPU kernels, interpreted: the same tokens as by plain jax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from glm5_jax import kernels
from glm5_jax.infer import cache
from glm5_jax.infer.programs import EngineConfig, programs
from glm5_jax.infer.request import Request
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from glm5_jax.ops import indexer, mla, sparse_attention
from glm5_jax.ops.pages import PagedKeys, PagedLatents
from glm5_jax.shapes import Keys
from tests import tiny
from tests.infer.conftest import Model, no_leaks

# Pages are large, since interpret mode takes milliseconds a copy of one.
PAGE = 64
INTERPRETED = kernels.interpreted(pltpu.InterpretParams())
SIZES = {
  'page_size': PAGE, 'pages': 7, 'max_length': 96, 'max_sequences': 2, 'max_step_tokens': 40,
  'prefill_buckets': (32,), 'batch_buckets': (2,), 'page_buckets': (2,),
}  # fmt: skip


def decoding(p, q, *args, **kwargs):
  """The interpreted kernels for decoding, and plain jax for prefill, for which these take too long."""
  attend = INTERPRETED if q.nope.shape[1] <= 8 else sparse_attention.attend
  return attend(p, q, *args, **kwargs)


@pytest.fixture
def interpreted(monkeypatch):
  """Engines for `kernels='pallas'` can be made and run here."""
  monkeypatch.setattr(kernels, 'attend', decoding)
  programs.cache_clear()
  yield
  programs.cache_clear()


@pytest.fixture(scope='module')
def one_layer() -> Model:
  model = Model()
  model.config = tiny.config(first_k_dense_replace=0, num_hidden_layers=1)
  model.params = tiny.random_params(model.config)
  return model


def same(got, want) -> None:
  """The same tokens and, within 1e-5, the same log-probabilities."""
  assert got.ids == want.ids and got.finish_reason == want.finish_reason
  np.testing.assert_allclose(got.raw_logprobs, want.raw_logprobs, atol=1e-5)


def test_engine_gives_the_same_tokens(interpreted, one_layer):
  """Sequences of different lengths, over the end of a page, on pages of the prefix cache and freed ones."""
  pair = [one_layer.engine(kernels=name, **SIZES) for name in ('pallas', 'reference')]
  first = Request(one_layer.prompt(62), max_tokens=4, temperature=0)
  [[ours]], [[theirs]] = (engine.run([first]) for engine in pair)
  same(ours, theirs)
  again = [*first.prompt_ids, *theirs.ids, *one_layer.prompt(5, seed=1)]
  others = [
    Request(again, max_tokens=3, temperature=0),
    Request(one_layer.prompt(13, seed=2), max_tokens=3, temperature=0),
  ]
  for [ours], [theirs] in zip(*(engine.run(others) for engine in pair), strict=True):
    same(ours, theirs)
  for engine in pair:
    assert engine.stats()['saved_tokens'] == PAGE
    no_leaks(engine)
  # Packed rows: lane tiles of float32, latent and rotated key each of one.
  rows = pair[0]._latent
  assert rows.shape == (1, 7, PAGE, 1, 256) and rows.dtype == jnp.uint32


def test_drafts_are_verified_by_the_kernels(interpreted, one_layer):
  sizes = SIZES | {'draft_steps': 2}
  requests = [Request(one_layer.prompt(n, seed=n), max_tokens=5, temperature=0) for n in (61, 12)]
  pair = [one_layer.engine(kernels=name, **sizes) for name in ('pallas', 'reference')]
  for [ours], [theirs] in zip(*(engine.run(requests) for engine in pair), strict=True):
    same(ours, theirs)
  assert pair[0].stats()['accept_length'] == pair[1].stats()['accept_length']
  for engine in pair:
    no_leaks(engine)


def test_prefill_by_kernels_and_index_share():
  """A chunk of more than eight tokens, then one that reads it; a layer with the selection of another."""
  config = tiny.config(first_k_dense_replace=0, indexer_types=('full', 'shared'))
  params = tiny.random_params(config)
  ids = tiny.tokens(config, 2, 16)
  pool = cache.init_pool(config, 3, PAGE, kernels='pallas')
  paged = pool._replace(
    # What earlier owners left behind, however bad, must not matter.
    latent=pool.latent | jnp.uint32(0x7FC00000), index_k=pool.index_k + jnp.nan,
    table=jnp.array([[2], [1]], jnp.int32), length=jnp.zeros(2, jnp.int32),
  )  # fmt: skip

  @tiny.fast_jit
  def run(tokens, valid, paged):
    out = forward(
      params, tokens, config=config, segment_ids=valid, cache=paged,
      options=Options(attend=INTERPRETED),
    )  # fmt: skip
    return out.logits, out.cache

  valid = np.ones((2, 12), np.int32)
  valid[1, 10:] = 0
  before, paged = run(ids[:, :12], valid, paged)
  np.testing.assert_array_equal(paged.length, [12, 10])
  tokens = np.stack([ids[0, 12:14], ids[1, 10:12]])
  after, paged = run(tokens, np.ones_like(tokens), paged)
  want = np.asarray(tiny.forward(params, ids, config).logits)
  tiny.close('prefill', before[0], want[0, :12], 1e-5)
  tiny.close('prefill of the shorter', before[1, :10], want[1, :10], 1e-5)
  tiny.close('decoding', after[0], want[0, 12:14], 1e-5)
  tiny.close('decoding of the shorter', after[1], want[1, 10:12], 1e-5)


@functools.partial(tiny.fast_jit, static_argnames=('config', 'attend'))
def attention(p, q, paged, new, index, keys, *, config, attend):
  """Output and selection of layer 1 of two, from a pool that holds the new rows already."""
  latents = PagedLatents(paged, jnp.int32(1), new)
  index = sparse_attention.Index(index[0], PagedKeys(paged, jnp.int32(1), index[1]))
  request = sparse_attention.Request(selection=True)
  out, aux = attend(p, q, latents, keys, index, None, config, request)
  return out, aux['selection']


@pytest.mark.parametrize(
  'time, dtype, tolerance', [(1, 'float32', 1e-5), (3, 'bfloat16', 2e-2)], ids=['one', 'drafts']
)
def test_attention_equals_the_references(time, dtype, tolerance):
  """And the selections are the same; index scores are small integers, so that many tie."""
  c = tiny.config(dtype=dtype)
  rng = np.random.default_rng(0)
  lengths = np.array([0, 40, 100], np.int32)  # Before the new tokens.
  pool = cache.init_pool(c, 7, PAGE, kernels='pallas')
  table = jnp.array([[3, 6], [1, 6], [5, 2]], jnp.int32)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  def small(*shape):
    return jnp.asarray(rng.integers(-2, 3, shape), dtype)

  old = mla.Latents(normal(2, 3, 100, c.kv_lora_rank), normal(2, 3, 100, c.qk_rope_head_dim))
  rows = {'latent': pool.pack(old), 'index_k': small(2, 3, 100, c.index_head_dim)}
  paged = pool._replace(table=table, length=jnp.zeros(3, jnp.int32))
  first = {'latent': 0, 'index_k': 0}
  paged = paged.write(rows, jnp.arange(100) < lengths[:, None], first)
  new = mla.Latents(normal(3, time, c.kv_lora_rank), normal(3, time, c.qk_rope_head_dim))
  index_k = small(3, time, c.index_head_dim)
  paged = paged._replace(length=jnp.asarray(lengths)).write(
    {'latent': pool.pack(new)[None], 'index_k': index_k[None]}, jnp.ones((3, time), bool),
    {'latent': 1, 'index_k': 1},
  )  # fmt: skip
  heads = c.num_attention_heads
  p = {
    'w_uk': normal(c.kv_lora_rank, heads, c.qk_nope_head_dim),
    'w_uv': normal(c.kv_lora_rank, heads, c.v_head_dim),
  }
  q = mla.Queries(
    normal(3, time, heads, c.qk_nope_head_dim), normal(3, time, heads, c.qk_rope_head_dim),
    normal(3, time, c.q_lora_rank),
  )  # fmt: skip
  weights = jnp.asarray(rng.integers(-4, 5, (3, time, c.index_n_heads)) / 8, jnp.float32)
  queries = indexer.Queries(small(3, time, c.index_n_heads, c.index_head_dim), weights)
  slots = jnp.asarray(lengths[:, None] + np.arange(time), jnp.int32)
  keys = Keys(slots, jnp.ones_like(slots), jnp.ones((3, paged.slots), jnp.int32))
  arguments = (p, q, paged, new, (queries, index_k), keys)
  got, want = (
    attention(*arguments, config=c, attend=attend)
    for attend in (INTERPRETED, sparse_attention.attend)
  )
  np.testing.assert_array_equal(got[1], want[1])
  assert (np.asarray(got[1][0]) >= 0).sum(axis=-1).tolist() == list(range(1, time + 1))
  scale = float(jnp.abs(want[0]).max())
  np.testing.assert_allclose(
    np.asarray(got[0], np.float32), np.asarray(want[0], np.float32), atol=tolerance * scale
  )


def test_packed_rows_are_the_same_numbers():
  config = tiny.config(dtype='bfloat16')
  rng = np.random.default_rng(0)
  new = mla.Latents(
    jnp.asarray(rng.normal(size=(2, 3, config.kv_lora_rank)), 'bfloat16'),
    jnp.asarray(rng.normal(size=(2, 3, config.qk_rope_head_dim)), 'bfloat16'),
  )
  packed = kernels.PackedCache.pack(new)
  assert packed.shape == (2, 3, 1, 128) and packed.dtype == jnp.uint32
  jax.tree.map(np.testing.assert_array_equal, kernels.PackedCache.unpack(packed, new), new)


@pytest.mark.parametrize(
  'changes, sizes, message',
  [
    ({'sparse_attention': False}, {}, 'sparse attention only'),
    ({}, {'page_size': 48}, 'a page_size that divides 1024, not 48'),
    ({}, {'kernels': 'cuda'}, "must be 'reference' or 'pallas'"),
  ],
)
def test_what_the_kernels_do_not_do(changes, sizes, message):
  with pytest.raises(ValueError, match=message):
    EngineConfig(**{'kernels': 'pallas'} | sizes).resolve(tiny.config(**changes))
