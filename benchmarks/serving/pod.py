"""One step of GLM-5's engine on a TPU slice that is not here, by the compiler and published figures.

Every chip has rows of its own and attends alone; experts are divided over all of them, everything else is
on each. bfloat16 weights and cache, greedy, all rows of the same length; one new token a row, or a chunk of a
prompt. Buffers have room for four times an even load of the experts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import sharding
from glm5_jax.aot import hlo, program
from glm5_jax.aot import step as steps
from glm5_jax.aot.chips import roofline
from glm5_jax.config import ModelConfig, glm5
from glm5_jax.infer.cache import init_pool
from glm5_jax.infer.programs import without_gradients
from glm5_jax.kernels import Implementation, attention, paged_cache
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import abstract_params, forward, unembed
from glm5_jax.ops import collectives

PAGE = 64
# The tiles in which a chip's matrix units take weights, where they are not those of its arrays. Weights are
# placed in them once; otherwise every step copies all of them.
_WEIGHT_TILES = {'tpu7x': ((16, 128), (2, 1))}


def step(
  config: ModelConfig, kernels: Implementation, params: Any, latent, index_k, table, length, tokens
):
  """The next token of every row, and the pool with the latents of these."""
  cache = paged_cache(kernels)(latent, index_k, table, length)
  options = Options(attend=attention(kernels))
  out = forward(params, tokens, config=config, cache=cache, options=options, logits=False)
  chosen = jnp.argmax(unembed(params, out.hidden[:, -1:]), axis=-1)
  return chosen, out.cache.latent, out.cache.index_k


def lower(
  config: ModelConfig, mesh: jax.sharding.Mesh, rows: int, context: int, kernels: Implementation,
  new: int = 1, tiles: tuple[tuple[int, ...], ...] | None = None,
) -> Any:  # fmt: skip
  """`step` for `new` tokens of `rows` rows a device after `context`, without a single array.

  `tiles` are those of the weights' layout; None leaves them to the compiler.
  """
  config = without_gradients(config).replace(scan_unroll=1)
  devices, pages = mesh.size, -(-(context + new) // PAGE)
  params = sharding.abstract_params(abstract_params(config), mesh)
  if tiles is not None:
    params = jax.tree.map(functools.partial(_tiled, tiles), params)
  split = P(None, 'expert'), P('expert')

  def where(spec, ndim):
    # A row of the pool in one piece. TPUs would lay out an array so that it takes the least memory, and
    # copy all of it for each step.
    return Format(Layout(tuple(range(ndim))), NamedSharding(mesh, spec))

  def struct(spec, *shape, dtype='int32'):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where(spec, len(shape)))

  held = devices * (1 + rows * pages)  # Page 0 is nobody's.
  empty = jax.eval_shape(functools.partial(init_pool, config, held, PAGE, kernels=kernels))
  pool = [struct(split[0], *a.shape, dtype=a.dtype) for a in (empty.latent, empty.index_k)]
  arguments = (
    *pool,
    struct(split[1], devices * rows, pages), struct(split[1], devices * rows),
    struct(split[1], devices * rows, new),
  )  # fmt: skip
  specs = sharding.param_specs(params, mesh), split[0], split[0], *(split[1],) * 3

  def on_device(params, *cache):
    return step(config, kernels, params, *cache)

  body = collectives.on_mesh(on_device, mesh, specs, (split[1], split[0], split[0]))
  with jax.set_mesh(mesh):
    outputs = NamedSharding(mesh, split[1]), *(where(split[0], a.ndim) for a in pool)
    jitted = jax.jit(body, donate_argnums=(1, 2), out_shardings=outputs)
    traced = jitted.trace(params, *arguments)
    return traced.lower(lowering_platforms=('tpu',))


def _tiled(tiles: tuple[tuple[int, ...], ...], a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """A bfloat16 matrix, or stack of them, in these tiles; anything else as it is."""
  if a.ndim < 2 or a.dtype != jnp.bfloat16:
    return a
  where = Format(Layout(tuple(range(a.ndim)), tiles), a.sharding)
  return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)


def measure(
  topology_name: str,
  context: int,
  rows: int,
  kernels: Implementation = 'reference',
  new: int = 1,
  **changes: Any,
) -> dict[str, Any]:
  """What the compiled step needs, and tokens a second of a chip by its roofline.

  Args:
    topology_name: 'v5p:4x4x4' and the like; the number of its devices divides the experts.
    context: tokens of every row.
    rows: of a device; tpu7x has two devices a chip.
    kernels: of attention, as the engine's.
    new: tokens of a row in the step: 1 decodes, more are a chunk of a prompt.
    changes: of the model.

  Raises:
    ConfigError: an unknown topology.
    jax.errors.JaxRuntimeError: the compiler refuses.
  """
  sizes: dict[str, Any] = {
    'dtype': 'bfloat16', 'param_dtype': 'bfloat16', 'expert_matmul': 'ragged_dot',
    'expert_capacity': 4.0,
  }  # fmt: skip
  config = glm5(**sizes | changes)
  topology = steps.find_topology(topology_name)
  mesh = sharding.make_mesh({'expert': len(topology.devices)}, topology.devices)
  tiles = _WEIGHT_TILES.get(topology_name.partition(':')[0])
  found = program.planned(lower(config, mesh, rows, context, kernels, new, tiles))
  work = hlo.measure(found.text, steps.filled_rows(config, mesh.size))
  chip = topology.device
  bound = roofline(chip, work.flops, work.bytes, sum(c.sent for c in work.collectives.values()))
  return {
    'topology': topology.name, 'chips': topology.chips, 'devices': mesh.size, 'context': context,
    'kernels': kernels, 'new': new,
    'rows_per_device': rows, 'argument_bytes': found.argument_bytes, 'peak_bytes': found.peak_bytes,
    'fits': found.peak_bytes <= chip.hbm_bytes, 'flops': work.flops, 'bytes': work.bytes,
    'roofline_seconds': bound._asdict(),
    'tokens_per_second_per_chip': {
      'overlapped': new * rows * mesh.size / topology.chips / bound.overlapped,
      'serial': new * rows * mesh.size / topology.chips / bound.serial,
    },
  }  # fmt: skip


def table(result: dict[str, Any]) -> str:
  """The result for people."""
  from benchmarks.serving import runs

  bound, speed = result['roofline_seconds'], result['tokens_per_second_per_chip']
  head = ('attention', 'context', 'new', 'slice', 'rows a chip', 'memory of a device, GB', 'compute, ms', 'HBM, ms',
          'network, ms', 'tokens/s a chip, at once', 'one after another')  # fmt: skip
  return runs.markdown(head, [(
    result['kernels'], result['context'], result['new'], result['topology'], result['rows_per_device'] * result['devices'] // result['chips'],
    result['peak_bytes'] / 1e9, *(1e3 * bound[k] for k in ('compute', 'memory', 'network')),
    speed['overlapped'], speed['serial'],
  )])  # fmt: skip
