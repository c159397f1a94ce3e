"""The paged cache: same logits as the forward pass of training; its size; who owns which page."""

import functools

import jax
import numpy as np
import pytest

from glm5_jax import config as configs
from glm5_jax.infer import cache
from glm5_jax.infer.programs import by_layer, programs
from glm5_jax.modules.model import forward, init_cache
from glm5_jax.ops.pages import PagedCache
from tests import tiny

LENGTH, ROWS = 40, 3
SHARED = {'num_hidden_layers': 3, 'indexer_types': ('full', 'full', 'shared')}
ONE_STACK = {'first_k_dense_replace': 0}
DENSE = {'sparse_attention': False} | ONE_STACK


@functools.partial(tiny.fast_jit, static_argnames='config')
def run_paged(params, tokens, valid, paged, config):
  out = forward(params, tokens, config=config, segment_ids=valid, cache=paged)
  return out.logits, out.cache


def random_chunks(rng, params, config, ids, pool, page_size, time):
  """Logits of `ids` [B, T], fed to a paged cache in random pieces of up to `time` a row."""
  lengths = rng.integers(1, LENGTH + 1, ROWS)
  lengths[0] = LENGTH
  width = cache.pages_for(LENGTH, page_size)
  table = 1 + rng.permutation(pool.latent.shape[1] - 1)[: ROWS * width].reshape(ROWS, width)
  paged = PagedCache(pool.latent, pool.index_k, table.astype(np.int32), np.zeros(ROWS, np.int32))
  got = np.zeros((ROWS, LENGTH, config.vocab_size))
  done = np.zeros(ROWS, int)
  while (done < lengths).any():
    counts = np.minimum(rng.integers(0, time + 1, ROWS), lengths - done)
    tokens = rng.integers(0, config.vocab_size, (ROWS, time)).astype(np.int32)
    valid = (np.arange(time) < counts[:, None]).astype(np.int32)
    for row in range(ROWS):
      tokens[row, : counts[row]] = ids[row, done[row] : done[row] + counts[row]]
    logits, paged = run_paged(params, tokens, valid, paged, config)
    for row in range(ROWS):
      got[row, done[row] : done[row] + counts[row]] = logits[row, : counts[row]]
    done += counts
    np.testing.assert_array_equal(paged.length, done)
  return got, np.arange(LENGTH) < lengths[:, None]


@pytest.mark.parametrize(
  'page_size, time, changes',
  [(1, 6, {}), (4, 12, ONE_STACK), (5, 1, ONE_STACK), (16, 6, SHARED), (4, 5, DENSE)],
  ids=['tiny-pages', 'expanded-chunks', 'single-steps', 'index-share', 'dense'],
)
def test_logits_equal_the_training_forward(page_size, time, changes):
  config = tiny.config(**changes)
  assert config.index_topk < LENGTH / 4
  params = tiny.random_params(config)
  pages = ROWS * cache.pages_for(LENGTH, page_size) + 3
  pool = cache.init_pool(config, pages, page_size)
  # What earlier owners left behind, however bad, must not matter.
  pool = pool._replace(latent=pool.latent + np.nan, index_k=pool.index_k + np.nan)
  for seed in range(3):
    ids = tiny.tokens(config, ROWS, LENGTH, seed)
    want = np.asarray(tiny.forward(params, ids, config).logits)
    rng = np.random.default_rng(seed)
    got, where = random_chunks(rng, params, config, ids, pool, page_size, time)
    tiny.close(f'paged logits, {seed}', got, want, 1e-5, where=where[:, :, None])


def test_rows_of_the_pool():
  """Layer l of the pool holds layer l's rows, in the order of their tokens."""
  config = tiny.config(**ONE_STACK)
  params = tiny.random_params(config)
  ids = tiny.tokens(config, 1, 8)
  pool = cache.init_pool(config, 4, 4)
  paged = PagedCache(pool.latent, pool.index_k, np.array([[3, 1]], np.int32), np.zeros(1, np.int32))
  _, paged = run_paged(params, ids, np.ones_like(ids), paged, config)
  contiguous = tiny.forward(params, ids, config, cache=init_cache(config, 1, 8)).cache
  for layer in range(2):
    block = jax.tree.map(
      lambda a, layer=layer: np.asarray(a[layer, 0]), contiguous['moe']['block0']
    )
    want = np.concatenate([block['c'], block['k_rope']], axis=-1)
    got = np.asarray(paged.latent)[layer, [3, 1]].reshape(8, -1)
    tiny.close('latent rows', got, want, 1e-6)
    got = np.asarray(paged.index_k)[layer, [3, 1]].reshape(8, -1)
    tiny.close('index keys', got, block['k_index'], 1e-6)
  assert not np.asarray(paged.latent)[:, [0, 2]].any(), 'a page of nobody was written'


@pytest.mark.parametrize('changes', [ONE_STACK, DENSE], ids=['sparse', 'dense'])
def test_a_step_does_not_copy_the_pool(changes):
  """It is donated, and its rows are written where they lie, after all that is read of it."""
  config = tiny.config(**changes)
  params = by_layer(tiny.random_params(config), config)
  pool = cache.init_pool(config, 2000, 4)
  one, table = np.ones(2, np.int32), np.ones((2, 8), np.int32)
  forward = programs(config, 0, tuple(tiny.FAST_COMPILE.items())).forward
  lowered = forward.lower(params, pool.latent, pool.index_k, None, one[:, None], one, table, one)
  assert lowered.compile().memory_analysis().temp_size_in_bytes < pool.index_k.nbytes


def test_copy_page():
  pool = cache.init_pool(tiny.config(), 5, 2)
  rng = np.random.default_rng(0)
  latent, index = (rng.standard_normal(a.shape, np.float32) for a in (pool.latent, pool.index_k))
  got = jax.jit(cache.copy_page)(latent, index, 3, 1)
  for before, after in zip((latent, index), got, strict=True):
    want = before.copy()
    want[:, 1] = want[:, 3]
    np.testing.assert_array_equal(after, want)


def test_token_bytes_of_glm5():
  """78 layers of 512 + 64 and 128 values; 64 or 8 heads of 256 + 256; bfloat16."""
  got = cache.token_bytes(configs.glm5())
  assert got.latent == 2 * 78 * (576 + 128) == 109_824
  assert got.indexer == 2 * 78 * 128
  assert got.mha == 2 * 78 * 64 * 512
  assert got.gqa == 2 * 78 * 8 * 512
  assert round(got.saved_to_mha, 4) == 0.9785
  assert round(got.saved_to_gqa, 4) == 0.8281
  narrow = cache.token_bytes(configs.glm5(), head_dim=128)
  assert narrow.gqa == 2 * 78 * 8 * 256 and round(narrow.saved_to_gqa, 4) == 0.6562
  assert cache.token_bytes(configs.glm5_2()).indexer == 2 * 21 * 128


@pytest.mark.parametrize('changes', [{}, SHARED], ids=['plain', 'index-share'])
def test_pool_takes_what_token_bytes_says(changes):
  config = tiny.config(**changes)
  pool = cache.init_pool(config, 3, 4)
  values = pool.latent.nbytes + pool.index_k.nbytes
  assert values == 3 * 4 * cache.token_bytes(config, itemsize=4).latent


def test_allocator():
  pages = cache.PageAllocator(5)
  assert pages.allocate(5) is None and pages.free == 4
  taken = pages.allocate(4)
  assert sorted(taken) == [1, 2, 3, 4] and pages.free == 0
  pages.retain(taken[0])
  pages.release(taken[0])
  assert pages.free == 0 and pages.references(taken[0]) == 1
  for page in taken:
    pages.release(page)
  assert pages.free == 4 and pages.used == 0
  with pytest.raises(ValueError, match='free already'):
    pages.release(2)
  with pytest.raises(ValueError, match='nobody can share'):
    pages.retain(2)
