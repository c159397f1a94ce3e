"""The table of the ops' memory, and that every op is called as the model calls it."""

import jax
import pytest

from benchmarks import kernel_memory


def test_table():
  found = {'op': {4096: 2**20, 16_384: 3 * 2**20}}
  head, _, line = kernel_memory.table(found).splitlines()
  assert head == '| MiB | T = 4,096 | T = 16,384 | KiB a token at the end |'
  assert line == f'| op | 1 | 3 | {2 * 1024 / (16_384 - 4096):.1f} |'


@pytest.mark.parametrize('op', kernel_memory.OPS)
def test_ops_trace(op):
  """Gradients have the shapes of what they are for; selections those of the queries."""
  function, arguments = kernel_memory.OPS[op](4096, 'v6e')
  out = jax.eval_shape(function, *arguments)
  if op == 'indexer_topk':
    assert out[0].shape == (1, 4096, kernel_memory.TOPK)
  else:
    assert [x.shape for x in out] == [x.shape for x in arguments[: len(out)]]


@pytest.mark.tpu
def test_memory_is_linear_in_the_length():
  """Four times the tokens take at most four times the memory."""
  short, long = (kernel_memory.temporary_bytes('indexer_topk', n, 'v5p') for n in (16_384, 65_536))
  assert short < long < 4 * short


def test_plot(tmp_path):
  path = tmp_path / 'memory.png'
  kernel_memory.plot({'op': {4096: 2**20, 16_384: 3 * 2**20}}, 'v5p', str(path))
  assert path.read_bytes().startswith(b'\x89PNG')
