"""The decoding step of a pod, compiled for four chips with a small model of the same kind."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tpu

SMALL = """
import json, os, sys
from benchmarks.serving import pod
found = pod.measure(
  sys.argv[1], 100, 2, sys.argv[2], num_hidden_layers=4, hidden_size=256, intermediate_size=256,
  moe_intermediate_size=128, n_routed_experts=8, vocab_size=512, q_lora_rank=128,
)
print(json.dumps(found), flush=True)
rows = 2 * found['devices'] // found['chips']
assert f'| {sys.argv[2]} | 100 | 1 | {sys.argv[1]} | {rows} |' in pod.table(found)
os._exit(0)  # The compiler goes on in a thread.
"""


@pytest.mark.parametrize(
  ('chips', 'kernels'), [('v5p:2x2x1', 'reference'), ('v5p:2x2x1', 'pallas'), ('tpu7x:2x2x1', 'reference')]
)  # fmt: skip
def test_a_step_on_four_chips(chips, kernels):
  """In a process of its own, since the compiler goes on in it. Of tpu7x with weights in its tiles."""
  command = [sys.executable, '-c', SMALL, chips, kernels]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  devices = 8 if chips.startswith('tpu7x') else 4
  assert (found['chips'], found['devices']) == (4, devices) and found['fits']
  # A token passes every parameter but the experts that are not chosen; kernels take whole chunks of keys.
  assert 1e7 < found['flops'] < (1e9 if kernels == 'reference' else 5e9)
  assert 0 < found['argument_bytes'] < found['peak_bytes'] < 1e9
  speed, bound = found['tokens_per_second_per_chip'], found['roofline_seconds']
  alone = [bound[resource] for resource in ('compute', 'memory', 'network')]
  assert speed['overlapped'] == pytest.approx(2 * devices / 4 / max(alone))
  assert speed['serial'] == pytest.approx(2 * devices / 4 / sum(alone))
