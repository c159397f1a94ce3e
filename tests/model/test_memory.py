"""Long rows: no tensor grows with T * S * heads. Compiled only, nothing is run."""

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from tests import tiny

TIME = 8192
CHUNK = 1 << 22  # Elements: 16 MB of float32.
CONFIG = tiny.config(
  num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, index_topk=64,
  attention_chunk_elements=CHUNK, num_nextn_predict_layers=0,
)  # fmt: skip
DENSE = CONFIG.replace(sparse_attention=False)
GQA = CONFIG.replace(attention='gqa')
KL = Options(indexer_loss=True, form='expanded')


def temporary_bytes(config, options, gradient: bool) -> int:
  def total(params, tokens):
    out = model.forward(params, tokens, config=config, options=options, logits=False)
    loss = jnp.sum(out.hidden**2)
    if options.indexer_loss:
      loss += jnp.sum(out.aux['dense']['block0']['kl'])
    return loss

  f = tiny.fast_jit(jax.grad(total) if gradient else total)
  tokens = jax.ShapeDtypeStruct((1, TIME), 'i4')
  compiled = f.lower(model.abstract_params(config), tokens).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  'config, options, gradient',
  [
    pytest.param(CONFIG, Options(), False, id='gathered'),
    pytest.param(CONFIG, Options(form='expanded'), False, id='masked'),
    pytest.param(CONFIG, Options(), True, id='gathered, gradients'),
    pytest.param(CONFIG, KL, True, id='masked, gradients of both losses'),
    pytest.param(DENSE, KL, True, id='dense, gradients of both losses'),
    pytest.param(GQA, Options(), True, id='GQA, gradients'),
  ],
)
def test_memory_is_bounded_by_the_chunk(config, options, gradient):
  """A few chunk-sized tensors at a time, and what is linear in T. Training may keep the selection,
  one byte a pair of query and key, but nothing per head, of which there are 8, and no float.
  """
  pairs, mega = TIME * TIME, 2**20
  used = temporary_bytes(config, options, gradient)
  print(f'[memory] {used / mega:.0f} MB; [B, N, T, S] float32 would be {pairs * 8 * 4 / mega:.0f}')
  linear = TIME * 512 * 4  # Some hundred floats a token.
  selection = pairs if gradient and config.sparse_attention and config.attention == 'mla' else 0
  allowed = 9 * 4 * CHUNK + linear + selection
  assert used < allowed < pairs * 8, f'{used / mega:.0f} MB, allowed {allowed / mega:.0f}'
