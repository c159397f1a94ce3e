"""Compiles a run's training step for TPUs that are not here, and says what it will need there.

  python -m experiments.aot_compile --config=configs/glm5_744b_pretrain.py --topology=v5p:8x8x16

It needs the TPU compiler (`pip install 'jax[tpu]'`) and no TPU: nothing is run. Any value of the
config can be changed as in experiments/run.py; `--config.mesh.AXIS=N` is how the chips are divided.
With `--plan` the compiler stops before machine code: all that is reported is decided by then, and
machine code takes most of its time. The last line is one JSON object.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from experiments import run

USAGE = (
  'usage: python -m experiments.aot_compile --config=configs/NAME.py [--config.KEY=VALUE ...]'
  ' --topology=CHIP:SHAPE [--plan]'
)


def report(needs: Any, topology: Any) -> str:
  """What a person wants to know, in lines."""
  from glm5_jax.aot.chips import SOURCE

  chip, work, bound = topology.chip, needs.work, needs.roofline
  mesh = ', '.join(f'{axis} {n}' for axis, n in needs.mesh.items() if n > 1) or 'one device'
  lines = [
    f'{topology.name}: {needs.chips} of {topology.chips} chips; mesh: {mesh}; compiled in'
    f' {needs.compile_seconds:.0f} s of CPU time',
    '',
    'memory of a chip, GB',
    f'  state and batch    {needs.argument_bytes / 1e9:10.2f}',
    f'  temporary          {needs.temporary_bytes / 1e9:10.2f}',
    f'  peak               {needs.peak_bytes / 1e9:10.2f} of {chip.hbm_bytes / 1e9:.0f}:'
    f' {"fits" if needs.fits else "DOES NOT FIT"}',
    '',
    'a step',
    f'  tokens             {needs.tokens:10,}',
    f'  model FLOPs        {needs.model_flops:10.3e}',
    f'  compiled FLOPs     {needs.flops * needs.chips:10.3e}, {needs.flops_ratio:.2f} of those',
    f'  bytes of HBM       {work.bytes:10.3e} a device',
  ]
  lines += [
    f'  {name:<19}{c.calls:10,} a device, {c.payload:.3e} bytes, of which it sends {c.sent:.3e};'
    f' {c.started:,} run beside others, which hide {needs.hidden.get(name, 0.0):.3e}'
    for name, c in sorted(work.collectives.items())
  ]
  if work.unknown_loops:
    lines.append(f'  {work.unknown_loops} loops end when their data say so; counted once')
  lines += [
    '',
    f'at best, by published figures ({SOURCE})',
    f'  compute            {bound.compute:10.3f} s at {chip.flops / 1e12:.0f} TFLOP/s a chip',
    f'  memory             {bound.memory:10.3f} s at {chip.hbm_bandwidth / 1e9:.0f} GB/s a chip',
    f'  network            {bound.network:10.3f} s at {chip.ici_bandwidth / 1e9:.0f} GB/s one way',
    f'  of which exposed   {bound.exposed:10.3f} s: nothing to compute meanwhile',
    f'  as scheduled       {bound.scheduled:10.3f} s, MFU {needs.mfu(chip, bound.scheduled):.1%}',
    f'  all at once        {bound.overlapped:10.3f} s, MFU {needs.mfu(chip, bound.overlapped):.1%}',
    f'  one after another  {bound.serial:10.3f} s, MFU {needs.mfu(chip, bound.serial):.1%}',
  ]
  return '\n'.join(lines)


def as_json(needs: Any, topology: Any) -> dict[str, Any]:
  """The same for programs; bytes and FLOPs are of a step, `_per_chip` of one chip."""
  from glm5_jax.aot.chips import SOURCE

  work, bound = needs.work, needs.roofline
  per_chip = needs.flops / work.flops if work.flops else 1.0
  return {
    'topology': topology.name,
    'chips': needs.chips,
    'mesh': dict(needs.mesh),
    'argument_bytes_per_chip': needs.argument_bytes,
    'temporary_bytes_per_chip': needs.temporary_bytes,
    'peak_bytes_per_chip': needs.peak_bytes,
    'hbm_bytes_per_chip': topology.chip.hbm_bytes,
    'fits': needs.fits,
    'compile_cpu_seconds': round(needs.compile_seconds, 1),
    'tokens': needs.tokens,
    'flops_per_chip': needs.flops,
    'model_flops': needs.model_flops,
    'flops_over_model_flops': needs.flops_ratio,
    'bytes_accessed_per_chip': work.bytes * per_chip,
    'collectives_per_chip': {
      name: {
        'count': c.calls, 'async_count': c.started, 'bytes': c.payload * per_chip,
        'sent_bytes': c.sent * per_chip, 'hidden_bytes': needs.hidden.get(name, 0.0) * per_chip,
      }
      for name, c in sorted(work.collectives.items())
    },
    'zero3_bytes_per_chip': needs.zero3_bytes,
    'kernel_flops_per_chip': {k: v * per_chip for k, v in sorted(work.kernels.items())},
    'loops_of_unknown_length': work.unknown_loops,
    'roofline_seconds': {
      **bound._asdict(), 'overlapped': bound.overlapped, 'scheduled': bound.scheduled,
      'serial': bound.serial,
    },
    'mfu_overlapped': needs.mfu(topology.chip, bound.overlapped),
    'mfu_scheduled': needs.mfu(topology.chip, bound.scheduled),
    'mfu_serial': needs.mfu(topology.chip, bound.serial),
    'peaks': topology.chip.__dict__ | {'source': SOURCE},
  }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0 done, 1 the compiler refuses, 2 wrong usage or an impossible config."""
  argv = list(sys.argv if argv is None else argv)
  if any(a in ('-h', '--help', '-help', '--helpfull') for a in argv[1:]):
    print(f'{__doc__}\n{USAGE}')
    return 0
  chosen = [a for a in argv[1:] if re.match(r'--?topology=', a)]
  if len(chosen) != 1:
    print(f'error: name one --topology=CHIP:SHAPE; {USAGE}', file=sys.stderr)
    return 2
  try:
    plan = '--plan' in argv
    rest = [a for a in argv[1:] if a not in (*chosen, '--plan')]
    config, _ = run.parse([argv[0], *rest, '--workdir=none'])
  except run.UsageError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  # The compiler looks for a TPU at first, and for other processes that use it.
  os.environ |= {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  }
  import jax

  from glm5_jax.aot import step
  from glm5_jax.train.prepare import ConfigError

  try:
    topology = step.find_topology(chosen[0].partition('=')[2])
    needs = step.compile_step(config, topology, plan)
  except ConfigError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  except jax.errors.JaxRuntimeError as e:
    print(f'error: the compiler refuses: {e}', file=sys.stderr)
    return 1
  print(report(needs, topology))
  print(json.dumps(as_json(needs, topology) | {'machine_code': not plan}), flush=True)
  return 0


if __name__ == '__main__':
  status = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)  # With --plan the compiler is still at work, and cannot be stopped.
