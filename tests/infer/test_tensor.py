"""An engine whose heads, widths and vocabulary are divided over devices: what one device says."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from glm5_jax import kernels
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.infer.request import Request
from tests import tiny
from tests.sharding import meshes
from tests.simulated import run_on_devices

SIZES = EngineConfig(
  page_size=4, pages=25, max_length=48, max_sequences=4, max_step_tokens=20, prefill_buckets=(8,),
  batch_buckets=(4,), page_buckets=(12,), compiler_options=tuple(tiny.FAST_COMPILE.items()),
)  # fmt: skip
CONFIG = meshes.config(num_hidden_layers=2)  # A dense layer and one with experts.


def _requests() -> list[Request]:
  """Prompts of several chunks, drawn from or not, with a penalty or not, one of them twice."""
  prompt = {n: tiny.tokens(CONFIG, 1, n, n)[0].tolist() for n in (5, 9, 21)}
  return [
    Request(prompt[5], max_tokens=12, seed=5, samples=2, top_logprobs=3),
    Request(prompt[9], max_tokens=12, temperature=0),
    Request(prompt[21], max_tokens=12, seed=7, presence_penalty=1.0),
  ]


def _engine(params, **changes) -> Engine:
  return Engine(params, CONFIG, None, dataclasses.replace(SIZES, **changes))


def _same(ours: list, theirs: list) -> None:
  both = (itertools.chain(*outputs) for outputs in (ours, theirs))
  for got, want in zip(*both, strict=True):
    assert got.ids == want.ids and got.versions == want.versions
    np.testing.assert_allclose(got.raw_logprobs, want.raw_logprobs, atol=1e-5)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def _engines():
  params, others = (tiny.random_params(CONFIG, seed=seed) for seed in (0, 1))
  for drafts in (0, 2):
    one = _engine(params, draft_steps=drafts)
    before = one.run(_requests())
    one.update_weights(others, 1)
    after = one.run(_requests())
    for devices in (2, 8):
      several = _engine(params, draft_steps=drafts, tensor=devices)
      assert several.checksum != one.checksum
      _same(several.run(_requests()), before)
      several.update_weights(others, 1, checksum=one.checksum)
      assert several.checksum == one.checksum
      _same(several.run(_requests()), after)
      stats = several.stats()
      assert stats['accept_length'] == one.stats()['accept_length'] >= 1
      assert stats['saved_tokens'] == one.stats()['saved_tokens'] > 0
  print('the same tokens')


def _memory():
  """Of what the table divides each device has a part, and of a copy that it may keep there is none."""
  params = tiny.random_params(CONFIG)
  engine = _engine(params, tensor=8)
  attention = engine._params['moe']['block0']['attn']
  assert attention['w_o'].sharding.shard_shape(attention['w_o'].shape) == (1, 1, 10, 32)
  assert all(len(a.devices()) == 8 for a in jax.tree.leaves(engine._params))
  again = Engine(engine._params, CONFIG, None, engine.sizes, keep=True)
  for kept, own in zip(
    jax.tree.leaves(again._params), jax.tree.leaves(engine._params), strict=True
  ):
    pointers = [[s.data.unsafe_buffer_pointer() for s in a.addressable_shards] for a in (kept, own)]
    assert pointers[0] == pointers[1]
  for sizes, message in (
    ({'tensor': 16}, 'is for 16 devices; there are 8'),
    ({'tensor': 3}, r'parameter \S+ \[.*\]: dimension . \(\d+\) does not divide by the mesh axis'),
    ({'tensor': 0}, 'must be positive'),
  ):
    with pytest.raises(ValueError, match=message):
      _engine(params, **sizes)
  print('a part each')


def _kernels():
  """Decoding by the TPU kernels, interpreted, with half of the heads on each of two devices."""
  interpreted = kernels.interpreted(True)

  def decoding(p, q, *args, **kwargs):
    attend = interpreted if q.nope.shape[1] <= 8 else kernels.sparse_attention.attend
    return attend(p, q, *args, **kwargs)

  kernels.attend = decoding
  config = meshes.config(num_hidden_layers=1)
  params = tiny.random_params(config)
  sizes = dataclasses.replace(
    SIZES, page_size=64, pages=4, max_length=64, max_sequences=1, batch_buckets=(1,),
    page_buckets=(1,), prefill_buckets=(16,),
  )  # fmt: skip
  request = Request(tiny.tokens(config, 1, 13)[0].tolist(), max_tokens=4, temperature=0)
  ours, theirs = (
    Engine(params, config, None, dataclasses.replace(sizes, **changes)).run([request])
    for changes in ({'kernels': 'pallas', 'tensor': 2}, {})
  )
  _same(ours, theirs)
  print('by kernels')


def test_the_same_tokens():
  assert 'the same tokens' in run_on_devices(_engines)


def test_memory_and_errors():
  assert 'a part each' in run_on_devices(_memory)


def test_by_kernels():
  assert 'by kernels' in run_on_devices(_kernels, 2)
