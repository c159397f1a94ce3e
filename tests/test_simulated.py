"""run_on_devices: the right number of devices, output passed back, failures passed on."""

import jax
import jax.numpy as jnp
import pytest

from tests.simulated import run_on_devices


def _sum_over_devices():
  mesh = jax.make_mesh((8,), ('data',))
  x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P('data')))
  print(jax.device_count(), len(x.addressable_shards), float(jax.jit(jnp.sum)(x)))


def _fail():
  raise RuntimeError(f'on {jax.device_count()} devices')


def test_runs_on_eight_devices():
  assert run_on_devices(_sum_over_devices).split() == ['8', '8', '120.0']


def test_failure_is_passed_on_with_its_output():
  with pytest.raises(AssertionError, match=r'RuntimeError: on 2 devices'):
    run_on_devices(_fail, n=2)
