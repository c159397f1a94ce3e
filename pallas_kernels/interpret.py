"""What TPU interpret mode saw."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call


def races_found() -> bool:
  """Whether the last kernel that ran with `detect_races` had a race; there is no public way to ask."""
  return bool(interpret_pallas_call.races and interpret_pallas_call.races.races_found)
