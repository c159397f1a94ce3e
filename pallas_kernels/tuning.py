"""Block sizes of the ops' kernels by chip, chosen from measured cycles (`tuning_table.py`).

Blocks are (queries of a block, queries of one matmul, keys of a chunk), and for `indexer_kl` the
keys of one matmul behind them, for `sparse_mla` gathered backward a 1 where the sum of gradient
rows runs beside matmuls.
"""

import functools

from pallas_kernels import tuning_table

# What a query is assumed to read: rows that it selected (gathered), of which the other queries of
# its block share all but a part each (0 would be selections that coincide, 1 disjoint ones); or the
# keys that it sees (dense), half of the longest sequence that is dense for its selections.
SELECTED, NEW_ROWS = 2048, 1 / 8
VISIBLE = {'sparse_mla': 4096, 'sparse_mla_paged': 2048, 'indexer_kl': 8192}
# Whose blocks a chip gets that was not measured. They fit in 64 MiB of VMEM like all others.
DEFAULT_CHIP = 'v6e'


def block_rows(queries: int, new_rows: float = NEW_ROWS) -> float:
  """Rows that a block of so many queries is assumed to read together."""
  return SELECTED * (1 + (queries - 1) * new_rows)


def cost(
  op: str, regime: str, blocks: tuple[int, ...], cycles: int, new_rows: float = NEW_ROWS
) -> float:
  """Cycles of a query under the assumptions above, with half a chunk for the last one's rest.

  Args:
    op: a key of `VISIBLE`.
    regime: 'gather' or 'dense'.
    blocks: sizes as in `tuning_table.CYCLES`.
    cycles: of one chunk of keys for a block of queries.
    new_rows: of a further query, if another share than is assumed.
  """
  queries, _, keys = blocks[:3]
  rows = block_rows(queries, new_rows) if regime == 'gather' else VISIBLE[op]
  # One query's list is a whole number of chunks.
  rest = 0 if regime == 'gather' and queries == 1 else keys / 2
  return cycles / (keys * queries) * (rows + rest)


@functools.cache
def best_blocks(chip: str, op: str, regime: str, direction: str) -> tuple[int, ...]:
  """The cheapest of the measured blocks, but longer chunks if they cost at most 1 % more.

  The schedule does not see what a chunk waits for; with fewer of them there is less of it. Of
  chunks equally long more queries a block: they read fewer rows.

  Args:
    chip: 'v5p', 'v6e' or 'tpu7x'; any other gets the blocks of `DEFAULT_CHIP`.
    op: 'sparse_mla', 'sparse_mla_paged' or 'indexer_kl'.
    regime: 'gather' or 'dense'.
    direction: 'forward' or 'backward'.

  Raises:
    KeyError: no such op, regime or direction.
  """
  table = tuning_table.CYCLES
  measured = table.get((chip, op, regime, direction)) or table[DEFAULT_CHIP, op, regime, direction]
  costs = {sizes: cost(op, regime, sizes, cycles) for sizes, cycles in measured.items()}
  good = [sizes for sizes in costs if costs[sizes] <= 1.01 * min(costs.values())]
  return min(good, key=lambda sizes: (-sizes[2], -sizes[0], costs[sizes], sizes))
