"""Prefix cache: which pages hold the cache rows of which tokens, so that nobody computes them twice.

A radix tree over token ids whose edges are whole pages. Its roots are weight versions: rows computed by
other weights are other rows. The tree owns one reference to each of its pages; those that nobody else
references are given up when memory is short, least recently used first.
"""

import collections
import dataclasses
from collections.abc import Sequence

from glm5_jax.infer.cache import PageAllocator

_Key = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Node:
  page: int
  key: _Key
  siblings: dict[_Key, '_Node']  # The dict that holds this node.
  children: dict[_Key, '_Node'] = dataclasses.field(default_factory=dict)


class PrefixCache:
  """See the module. All methods take the tokens of a request from its first one on.

  Attributes:
    evicted_pages: pages given up for want of memory.
  """

  def __init__(self, allocator: PageAllocator, page_size: int):
    self._allocator = allocator
    self._page_size = page_size
    self._roots: dict[int, dict[_Key, _Node]] = {}
    # Least recently used first. A node is touched after its descendants, hence a node whose turn it is
    # has none but younger or referenced ones.
    self._order: collections.OrderedDict[_Node, None] = collections.OrderedDict()
    self.evicted_pages = 0

  def __len__(self) -> int:
    return len(self._order)

  def match(self, version: int, tokens: Sequence[int]) -> list[int]:
    """Pages of the longest known prefix, each with a reference that the caller now owns.

    At least one token is left to compute, since its logits are wanted.
    """
    path = self._walk(version, tokens[: len(tokens) - 1])
    for node in path:
      self._allocator.retain(node.page)
    self._touch(path)
    return [node.page for node in path]

  def insert(self, version: int, tokens: Sequence[int], pages: Sequence[int]) -> None:
    """Makes the full pages of `tokens` known; where a page is known already, the older one stays."""
    path = []
    children = self._roots.setdefault(version, {})
    for key, page in zip(self._keys(tokens), pages, strict=False):
      node = children.get(key)
      if node is None:
        node = children[key] = _Node(page, key, children)
        self._allocator.retain(page)
      path.append(node)
      children = node.children
    self._touch(path)

  def evict(self, count: int) -> int:
    """Gives up to `count` pages that only the tree references; returns how many."""
    freed: list[_Node] = []
    for node in self._order:
      if len(freed) == count:
        break
      if self._allocator.references(node.page) == 1 and not node.children:
        del node.siblings[node.key]
        freed.append(node)
    for node in freed:
      del self._order[node]
      self._allocator.release(node.page)
    self.evicted_pages += len(freed)
    return len(freed)

  def drop_other_versions(self, version: int) -> None:
    """Forgets what other weights computed; pages that requests still use stay theirs."""
    for other in [v for v in self._roots if v != version]:
      stack = list(self._roots.pop(other).values())
      while stack:
        node = stack.pop()
        stack += node.children.values()
        del self._order[node]
        self._allocator.release(node.page)

  def clear(self) -> None:
    """Forgets everything."""
    for node in self._order:
      self._allocator.release(node.page)
    self._order.clear()
    self._roots.clear()

  def _keys(self, tokens: Sequence[int]) -> list[_Key]:
    size = self._page_size
    return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

  def _walk(self, version: int, tokens: Sequence[int]) -> list[_Node]:
    path: list[_Node] = []
    children = self._roots.get(version, {})
    for key in self._keys(tokens):
      node = children.get(key)
      if node is None:
        break
      path.append(node)
      children = node.children
    return path

  def _touch(self, path: list[_Node]) -> None:
    for node in reversed(path):
      self._order.pop(node, None)
      self._order[node] = None
