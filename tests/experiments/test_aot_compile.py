"""Compiling for absent TPUs: what is counted is what a program does, and the command says it."""

import json
import math
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import aot_compile
from glm5_jax import config as models
from glm5_jax import sharding
from glm5_jax.aot import hlo, overlap, program, step
from glm5_jax.aot.chips import CHIPS, roofline
from tests.simulated import run_on_devices


def _measured(f, *arguments) -> hlo.Work:
  return hlo.measure(jax.jit(f).lower(*arguments).compile().as_text() or '')


def test_flops_of_nested_loops():
  x, w = jnp.ones((16, 32)), jnp.ones((7, 32, 32))

  def layer(x, w):
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)
    return x, None

  work = _measured(lambda x, w: jax.lax.scan(layer, x, w)[0], x, w)
  assert work.flops == 7 * 3 * 2 * 16 * 32 * 32
  assert work.unknown_loops == 0 and not work.collectives and not work.kernels
  # Every layer reads its weights at least once a layer, and nothing is read much more often than
  # used.
  assert 4 * w.size <= work.bytes < 100 * 4 * w.size


def test_gradients_cost_twice_the_forward_pass():
  x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
  work = _measured(jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1)), x, w)
  assert work.flops == 3 * 2 * 8 * 16 * 4


def test_loops_that_depend_on_data():
  def halve(x):
    return jax.lax.while_loop(lambda x: jnp.max(x @ x) > 1, lambda x: x / 2, x)

  work = _measured(halve, jnp.ones((6, 6)))
  assert work.unknown_loops == 1


def test_convolutions():
  """Padding and dilations are no work: as a loop over outputs and window positions counts."""

  @hypothesis.given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3),
                    st.integers(1, 3), st.integers(1, 3))  # fmt: skip
  @hypothesis.settings(max_examples=12, deadline=None, database=None)
  def check(length, taps, stride, pad, spread, step):
    outputs = ((length - 1) * spread + 1 + 2 * pad - (taps - 1) * step - 1) // stride + 1
    if outputs < 1:
      return
    pairs = 0
    for output in range(outputs):
      for tap in range(taps):
        place = output * stride + tap * step - pad
        pairs += place % spread == 0 and 0 <= place // spread < length
    work = _measured(
      lambda x, w: jax.lax.conv_general_dilated(
        x, w, (stride,), [(pad, pad)], (spread,), (step,), ('NWC', 'WIO', 'NWC')
      ),
      jnp.ones((2, length, 5)), jnp.ones((taps, 5, 3)),
    )  # fmt: skip
    assert work.flops == 2 * pairs * 2 * 5 * 3

  check()


def _collectives():
  mesh = sharding.make_mesh({'fsdp': 4, 'tensor': 2})

  def f(x):
    def body(x, _):
      return jax.lax.psum(x, 'fsdp') / 4, None

    x, _ = jax.lax.scan(body, x, length=5)
    whole = jax.lax.all_gather(x, 'tensor', tiled=True)
    turned = jax.lax.all_to_all(x, 'fsdp', 0, 0, tiled=True)
    return whole, turned, jax.lax.psum_scatter(x, 'fsdp', tiled=True)

  spec = P('fsdp')
  on_devices = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False)
  found = _measured(on_devices, jnp.ones((64, 32))).collectives
  size = 4 * 64 * 32
  assert found['all-reduce'] == hlo.Collective(5, 5 * size, 5 * size * 2 * 3 / 4)
  assert found['all-gather'] == hlo.Collective(1, 2 * size, 2 * size / 2)
  assert found['all-to-all'] == hlo.Collective(1, size, size * 3 / 4)
  assert found['reduce-scatter'] == hlo.Collective(1, size, size * 3 / 4)
  assert len(found) == 4


def test_collectives():
  run_on_devices(_collectives)


# 3 iterations of: a gather that a product of matrices runs beside, and one that waits; an exchange that
# is longer than the product beside it. f32[8,8] products are 1,024 FLOPs, of 8 x 8 shards 768 bytes go out.
_OVERLAPPING = """
%in_start (x: f32[8,8]) -> f32[32,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[32,8]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
}

%async_collective_fusion.1 (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %all-gather.2 = f32[32,8]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %dot = f32[8,8]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%in_done (x: f32[8,8]) -> f32[32,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %all-gather.3 = f32[32,8]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
}

%exchange (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %all-to-all.1 = f32[8,8]{1,0} all-to-all(%x), replica_groups={{0,1,2,3}}, dimensions={0}
}

%body (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %async-collective-start.4 = f32[32,8]{1,0} fusion(%x), kind=kCustom, calls=%in_start
  %fusion.1 = f32[8,8]{1,0} fusion(%x, %x), kind=kOutput, calls=%async_collective_fusion.1
  %async-collective-done.4 = f32[32,8]{1,0} fusion(%x), kind=kCustom, calls=%in_done
  %all-gather.4 = f32[32,8]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %all-to-all-start = ((f32[8,8]{1,0}), f32[8,8]{1,0}) async-start(%x), calls=%exchange
  %dot.2 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-to-all-done = f32[8,8]{1,0} async-done(%all-to-all-start)
  %dot.3 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], f32[8,8]{1,0}) tuple(%i, %fusion.1)
}

%condition (state: (s32[], f32[8,8])) -> pred[] {
  %state = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %while = (s32[], f32[8,8]{1,0}) while(%state), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_what_the_schedule_hides():
  """A collective in flight is one call, however many fusions carry it; FLOPs hide no byte twice."""
  work = hlo.measure(_OVERLAPPING)
  assert work.flops == 3 * 3 * 1024
  assert work.collectives['all-gather'] == hlo.Collective(6, 6 * 1024, 6 * 768, started=3)
  assert work.collectives['all-to-all'] == hlo.Collective(3, 3 * 256, 3 * 192, started=3)
  # At 2 FLOPs a byte a product hides 512 bytes: a part of the gather, all of the exchange.
  assert overlap.hidden(_OVERLAPPING, 2.0) == {'all-gather': 3 * 512, 'all-to-all': 3 * 192}
  assert overlap.hidden(_OVERLAPPING, 1.0) == {'all-gather': 3 * 768, 'all-to-all': 3 * 192}


def test_grouped_matmuls_compute_filled_rows():
  """Their kernels skip tiles of rows that no group has, and the buffer has room for some."""
  text = """
ENTRY %main (x: bf16[64,8], w: bf16[4,8,16]) -> bf16[64,16] {
  %x = bf16[64,8]{1,0} parameter(0)
  %w = bf16[4,8,16]{2,1,0} parameter(1)
  ROOT %ragged-dot-none.3 = bf16[64,16]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call"
}
"""
  assert hlo.measure(text).flops == 2 * 64 * 8 * 16
  assert hlo.measure(text, filled=0.5).flops == 64 * 8 * 16


def test_kernels_say_what_they_move():
  """A kernel that gathers rows has a pool as operand, and reads little of it."""
  text = """
ENTRY %main (x: u32[4096,1,384], y: s32[64]) -> u32[64,1,384] {
  %x = u32[4096,1,384]{2,1,0} parameter(0)
  %y = s32[64]{0} parameter(1)
  ROOT %read.1 = u32[64,1,384]{2,1,0} custom-call(%y, %x), custom_call_target="tpu_custom_call"ESTIMATE
}
"""
  own = (
    ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"7","transcendentals":"0",'
    '"bytes_accessed":"196608","remote_bytes_transferred":"0"}}}'
  )
  whole = (4096 * 384 + 64 + 64 * 384) * 4
  assert hlo.measure(text.replace('ESTIMATE', '')).bytes == whole
  found = hlo.measure(text.replace('ESTIMATE', own))
  assert (found.bytes, found.flops, found.kernels) == (196608, 7, {'read': 7})
  grouped = text.replace('ESTIMATE', own).replace('%read.1', '%ragged-dot-none.1')
  assert hlo.measure(grouped).bytes == whole


def test_which_collectives_can_overlap():
  """Those that are started and awaited, alone or as a computation that runs beside the others."""
  text = """
%beside (x: f32[8]) -> f32[16] {
  %x = f32[8]{0} parameter(0)
  ROOT %all-gather.2 = f32[16]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[16] {
  %x = f32[8]{0} parameter(0)
  %all-gather.1 = f32[16]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
  %s = (f32[8], f32[16]) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %d = f32[16]{0} all-gather-done(%s)
  %a = ((f32[8]), f32[16]) async-start(%x), calls=%beside
  ROOT %b = f32[16]{0} async-done(%a)
}
"""
  assert hlo.measure(text).collectives == {'all-gather': hlo.Collective(3, 3 * 64, 3 * 32, 2)}


def test_slices_of_what_a_fusion_is_given():
  """Are read, and not all of it, also where a fusion within the fusion takes them."""
  text = """
%inner (a: f32[75,64], i: s32[]) -> f32[1,64] {
  %a = f32[75,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = f32[1,64]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,64}
}

%outer (p: f32[75,64], j: s32[]) -> f32[1,64] {
  %p = f32[75,64]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %fusion.2 = f32[1,64]{1,0} fusion(%p, %j), kind=kLoop, calls=%inner
  ROOT %negate.1 = f32[1,64]{1,0} negate(%fusion.2)
}

ENTRY %main (x: f32[75,64], k: s32[]) -> f32[1,64] {
  %x = f32[75,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %fusion.1 = f32[1,64]{1,0} fusion(%x, %k), kind=kLoop, calls=%outer
}
"""
  assert hlo.measure(text).bytes == 2 * 64 * 4 + 4


def test_an_empty_buffer_is_not_written():
  text = """
ENTRY %main (x: f32[64]) -> f32[128] {
  %x = f32[64]{0} parameter(0)
  %empty.1 = f32[128]{0} custom-call(), custom_call_target="AllocateBuffer"
  %zero = s32[] constant(0)
  ROOT %update.1 = f32[128]{0} dynamic-update-slice(%empty.1, %x, %zero)
}
"""
  assert hlo.measure(text).bytes == 2 * 64 * 4


def test_a_fusion_that_changes_tiles_within_a_fusion():
  """Moves nothing: what is sliced out of its result is what is read. As compiled for tpu7x."""
  text = """
%tiles (a: bf16[75,64,128]) -> bf16[75,64,128] {
  %a = bf16[75,64,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copy.1 = bf16[75,64,128]{2,1,0:T(8,128)(2,1)} copy(%a)
}

%outer (p: bf16[75,64,128], j: s32[]) -> bf16[1,64,128] {
  %p = bf16[75,64,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %fusion.2 = bf16[75,64,128]{2,1,0:T(8,128)(2,1)} fusion(%p), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tiles
  %j = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%fusion.2, %j, %zero, %zero), dynamic_slice_sizes={1,64,128}
}

ENTRY %main (x: bf16[75,64,128], k: s32[]) -> bf16[1,64,128] {
  %x = bf16[75,64,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %k = s32[] parameter(1)
  ROOT %fusion.1 = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} fusion(%x, %k), kind=kLoop, calls=%outer
}
"""
  assert hlo.measure(text).bytes == 2 * 64 * 128 * 2 + 4


def test_filled_rows():
  model = models.nano(n_routed_experts=16, num_experts_per_tok=4)
  assert step.filled_rows(model, 1) == 1.0
  # At worst all tokens of all devices choose one device's experts, of which there may be but two.
  assert step.filled_rows(model, 4) == 1 / 4
  assert step.filled_rows(model, 8) == 4 / (8 * 2)
  assert step.filled_rows(model.replace(expert_capacity=1.5), 8) == 1 / 1.5


def test_memory_of_an_assignment():
  text = """BufferAssignment:
allocation 0: size 32, output shape is |(f32[2])|, maybe-live-out:
 value: <1 tuple @0> (size=32,offset=0): (f32[2])
allocation 1: size 400, parameter 0, shape |f32[100]| at ShapeIndex {0}, maybe-live-out:
allocation 2: size 40, parameter 1, shape |f32[10]| at ShapeIndex {}:
allocation 3: size 4000, color 1, preallocated-temp:
allocation 4: size 100, preallocated-temp:
allocation 5: size 7, constant:
"""
  # A parameter that is given up for a result counts once; a core's own memory does not.
  assert program.memory_of(text) == (440, 107, 440 + 107 + 32)


def test_roofline():
  bound = roofline(
    CHIPS['v5p'], 459e12, hbm_bytes=2765e9 / 2, sent_bytes=600e9 * 2, hidden_bytes=300e9
  )
  np.testing.assert_allclose(bound, (1.0, 0.5, 2.0, 1.5))
  assert math.isclose(bound.overlapped, 2.0) and math.isclose(bound.serial, 3.5)
  assert math.isclose(bound.scheduled, 2.5)


@pytest.mark.parametrize(
  'arguments, text',
  [
    (['--config=configs/nano_pretrain.py'], 'name one --topology=CHIP:SHAPE'),
    (['--config=configs/nano_pretrain.py', '--topology=v4:2x2x1'], 'must be a chip (v5p, v6e, tpu'),
    (['--topology=v5p:2x2x1'], '--config is missing'),
    (['--config=configs/nano_pretrain.py', '--topology=v5p:2x2x1', '--config.mesh.fdsp=2'],
     'did you mean --config.mesh.fsdp?'),
  ],
)  # fmt: skip
def test_usage(arguments, text, capsys):
  assert aot_compile.main(['aot_compile', *arguments]) == 2
  assert text in capsys.readouterr().err


def _run(capsys, *arguments) -> tuple[str, dict]:
  small = (
    '--config=tests/train/tiny_config.py', '--config.data.batch_size=8',
    '--config.data.sources.kind=stdlib',
  )  # fmt: skip
  assert aot_compile.main(['aot_compile', *small, *arguments]) == 0
  *lines, last = capsys.readouterr().out.strip().splitlines()
  return '\n'.join(lines), json.loads(last)


@pytest.mark.tpu
def test_a_mesh_of_chips(capsys):
  text, found = _run(
    capsys, '--topology=v5p:2x2x1', '--config.mesh.fsdp=-1', '--config.mesh.expert=2',
    '--config.model.expert_matmul=ragged_dot', '--config.train.mtp_steps=0',
  )  # fmt: skip
  assert found['chips'] == 4 and found['mesh']['fsdp'] == found['mesh']['expert'] == 2
  assert found['fits'] is True and 'fits' in text
  assert found['peak_bytes_per_chip'] >= found['argument_bytes_per_chip'] > 0
  assert found['flops_over_model_flops'] > 1
  # Parameters are gathered and gradients scattered over fsdp, rows go to their experts and back.
  assert {'all-gather', 'reduce-scatter', 'ragged-all-to-all'} <= found[
    'collectives_per_chip'
  ].keys()
  assert any(name.startswith('ragged-dot') for name in found['kernel_flops_per_chip'])
  assert 'tgmm' in found['kernel_flops_per_chip']
  seconds = found['roofline_seconds']
  assert seconds['overlapped'] == max(seconds[k] for k in ('compute', 'memory', 'network'))
  mfu = found['model_flops'] / (4 * 459e12 * seconds['overlapped'])
  assert math.isclose(found['mfu_overlapped'], mfu)


@pytest.mark.tpu
def test_chips_of_two_devices(capsys):
  text, found = _run(
    capsys, '--topology=tpu7x:2x2x1', '--config.mesh.fsdp=-1', '--config.train.mtp_steps=0',
    '--config.stage=dsa_warmup', '--config.init_from=before',
  )  # fmt: skip
  assert found['chips'] == 4 and found['mesh']['fsdp'] == 8 and '4 of 4 chips' in text
  assert found['hbm_bytes_per_chip'] == 192e9


@pytest.mark.tpu
def test_a_plan_is_what_is_compiled():
  """Program and memory, without waiting for the machine code."""
  devices = step.find_topology('v5p:2x2x1').devices[:1]
  where = NamedSharding(Mesh(np.array(devices), ('x',)), P())
  x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=where)

  def f(x):
    return jnp.tanh(x @ x.T) @ x

  lowered = jax.jit(f).trace(x).lower(lowering_platforms=('tpu',))
  whole, plan = program.compiled(lowered), program.planned(lowered)
  assert plan.argument_bytes == whole.argument_bytes == 2 * 512 * 1024
  # The machine code has some memory of its own.
  assert 0 <= whole.peak_bytes - plan.peak_bytes < 1 << 24
  assert hlo.measure(plan.text) == hlo.measure(whole.text)
  assert hlo.measure(plan.text).flops == 2 * 2 * 512 * 512 * 1024


@pytest.mark.tpu
def test_pretraining_of_744b_on_a_pod():
  """What docs/scale.md says of it, in micro-batches half as large.

  In a process of its own, since the compiler goes on in it.
  """
  command = (
    '-m', 'experiments.aot_compile', '--config=configs/glm5_744b_pretrain.py',
    '--topology=v5p:8x8x16', '--plan', '--config.train.grad_accum=16',
  )  # fmt: skip
  done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['chips'] == 1024 and found['fits']
  assert 7e9 < found['argument_bytes_per_chip'] < found['peak_bytes_per_chip'] < 45e9
  assert 1.25 < found['flops_over_model_flops'] < 1.28
  sent = sum(c['sent_bytes'] for c in found['collectives_per_chip'].values())
  assert sent < 0.3 * found['zero3_bytes_per_chip']
