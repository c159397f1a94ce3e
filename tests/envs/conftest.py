"""The sandbox, which is the one thing here that pip cannot install."""

import pytest

from glm5_jax.envs import sandbox


@pytest.fixture(scope='session')
def bubblewrap() -> None:
  """For tests that need programs to be sandboxed. `.ci/run` installs what that takes, or fails."""
  reason = sandbox.available()
  assert not reason, reason
