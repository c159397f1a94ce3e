"""The sandbox, which is the one thing here that pip cannot install."""

import pytest

from glm5_jax.envs import sandbox


@pytest.fixture(scope='session')
def bubblewrap() -> None:
  """Skips where programs cannot be sandboxed. `.ci/run` installs what that takes, or fails."""
  if reason := sandbox.available():
    pytest.skip(reason)
