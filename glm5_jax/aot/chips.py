"""Published figures of TPU chips, and how fast a step can be at best by them.

Source: Google Cloud, Cloud TPU documentation, page 'TPU7x (Ironwood)', table of key specifications,
which compares the three chips (https://docs.cloud.google.com/tpu/docs/tpu7x).
"""

import dataclasses
from typing import NamedTuple

SOURCE = (
  'Google Cloud, Cloud TPU documentation, TPU7x (Ironwood), key specifications'
  ' (https://docs.cloud.google.com/tpu/docs/tpu7x)'
)


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip, with all the cores that it has.

  Attributes:
    flops: Peak in bfloat16, FLOP/s.
    hbm_bytes: Capacity; the table's GiB are taken as 1e9 bytes.
    hbm_bandwidth: Bytes/s.
    ici_bandwidth: Bytes/s between chips over all links, in one direction: half of the table's.
  """

  flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  ici_bandwidth: float


CHIPS = {
  'v5p': Chip(459e12, 95e9, 2765e9, 600e9),
  'v6e': Chip(918e12, 32e9, 1638e9, 400e9),
  'tpu7x': Chip(2307e12, 192e9, 7380e9, 600e9),
}


class Roofline(NamedTuple):
  """Seconds that a step takes at least for each resource of a chip, each alone at its peak.

  The step takes `overlapped` if all three work at the same time, and `serial` if never two do.
  `exposed` is the part of the network's time for which the compiled schedule has nothing to compute, and
  `scheduled` what the step takes with that on top.
  """

  compute: float
  memory: float
  network: float
  exposed: float

  @property
  def overlapped(self) -> float:
    return max(self.compute, self.memory, self.network)

  @property
  def scheduled(self) -> float:
    return max(self.compute, self.memory) + self.exposed

  @property
  def serial(self) -> float:
    return self.compute + self.memory + self.network


def roofline(
  chip: Chip, flops: float, hbm_bytes: float, sent_bytes: float, hidden_bytes: float = 0.0
) -> Roofline:
  """Of a chip's work in a step: FLOPs, bytes of HBM, bytes sent to other chips, and how many of those
  go while the chip computes (see `overlap.hidden`).
  """
  return Roofline(
    flops / chip.flops, hbm_bytes / chip.hbm_bandwidth, sent_bytes / chip.ici_bandwidth,
    (sent_bytes - hidden_bytes) / chip.ici_bandwidth,
  )  # fmt: skip
