"""The prefix tree against a plain dictionary, and its order of eviction."""

import numpy as np

from glm5_jax.infer.cache import PageAllocator
from glm5_jax.infer.prefix import PrefixCache


def put(tree: PrefixCache, pages: PageAllocator, version: int, tokens: list[int]) -> list[int]:
  """Inserts tokens as a finished sequence does, which had matched before; returns its pages."""
  own = tree.match(version, [*tokens, 0])
  own += pages.allocate(len(tokens) // 2 - len(own))
  tree.insert(version, tokens, own)
  for page in own:
    pages.release(page)
  return own


def test_longest_prefix_in_whole_pages():
  pages = PageAllocator(20)
  tree = PrefixCache(pages, 2)
  own = put(tree, pages, 0, [1, 2, 3, 4, 5])
  assert len(tree) == 2 and pages.used == 2
  for tokens, found in (
    ([1, 2, 3, 4, 5, 6], 2), ([1, 2, 3, 4], 1), ([1, 2, 3, 9, 9], 1), ([1, 9, 3, 4, 5], 0), ([1], 0)
  ):  # fmt: skip
    got = tree.match(0, tokens)
    assert got == own[:found], tokens
    for page in got:
      assert pages.references(page) == 2
      pages.release(page)
  assert tree.match(1, [1, 2, 3, 4, 5]) == [], 'other weights computed other rows'
  tree.clear()
  assert pages.used == 0


def test_the_older_page_stays():
  pages = PageAllocator(20)
  tree = PrefixCache(pages, 2)
  first = pages.allocate(2)
  tree.insert(0, [1, 2, 3, 4], first)
  second = pages.allocate(3)
  tree.insert(0, [1, 2, 3, 4, 5, 6], second)
  assert [pages.references(p) for p in (*first, *second)] == [2, 2, 1, 1, 2]
  for page in (*first, *second):
    pages.release(page)
  assert pages.used == 3
  # The duplicate's page hangs below a page that it did not reference itself.
  assert tree.evict(5) == 3 and pages.used == 0


def test_least_recently_used_leaf_goes_first():
  pages = PageAllocator(20)
  tree = PrefixCache(pages, 2)
  for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 4, 4], [5, 5]):
    put(tree, pages, 0, tokens)

  def known(*tokens: int) -> bool:
    """Without counting as a use."""
    return len(tree._walk(0, list(tokens))) == len(tokens) // 2

  held = tree.match(0, [1, 1, 2, 2, 9])
  assert tree.evict(1) == 1 and not known(1, 1, 2, 2, 3, 3), 'the end of the oldest path'
  assert tree.evict(1) == 1 and not known(1, 1, 4, 4)
  assert tree.evict(9) == 1 and not known(5, 5)
  assert known(1, 1, 2, 2), 'what a request uses stays'
  for page in held:
    pages.release(page)
  assert tree.evict(9) == 2 and pages.used == len(tree) == 0


def test_against_a_dictionary():
  """Random inserts and matches over two versions, without eviction."""
  rng = np.random.default_rng(0)
  pages = PageAllocator(5000)
  tree = PrefixCache(pages, 3)
  known: dict[tuple, int] = {}
  for _ in range(400):
    version = int(rng.integers(2))
    tokens = rng.integers(0, 2, rng.integers(1, 16)).tolist()
    want = []
    for end in range(3, len(tokens), 3):
      if (version, *tokens[:end]) not in known:
        break
      want.append(known[(version, *tokens[:end])])
    got = tree.match(version, tokens)
    assert got == want
    own = got + pages.allocate(len(tokens) // 3 - len(got))
    tree.insert(version, tokens, own)
    for i, page in enumerate(own):
      known.setdefault((version, *tokens[: 3 * (i + 1)]), page)
      pages.release(page)
  assert len(tree) == pages.used == len(known)
  tree.drop_other_versions(1)
  assert pages.used == sum(k[0] == 1 for k in known)
  assert tree.evict(10_000) == sum(k[0] == 1 for k in known) and len(tree) == 0
  assert pages.used == 0
