"""Prometheus metrics of a server: what clients see, and the engine's own counters."""

from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import core, registry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_COUNTERS = {
  'requests': 'Requests that the engine took.',
  'steps': 'Steps.',
  'prefill_tokens': 'Prompt tokens computed.',
  'generated_tokens': 'Tokens generated.',
  'finished': 'Answers that came to their end.',
  'cancelled': 'Answers that were cancelled: the client went, or time was over.',
  'saved_tokens': 'Prompt tokens that the prefix cache or another sample supplied.',
  'preemptions': 'Answers that lost their pages and were computed anew.',
}
_GAUGES = {
  'accept_length': 'Tokens that an answer gains in a step; above 1 with drafts.',
  'waiting': 'Answers that wait for a place.',
  'running': 'Answers that are generated.',
  'pages': 'Cache pages.',
  'pages_used': 'Cache pages in use, those of cached prefixes included.',
  'pages_cached': 'Cache pages that hold prefixes.',
  'bytes_per_token': 'Cache bytes of a token.',
  'version': 'Version of the weights.',
}


class Metrics:
  """Everything that `/metrics` shows.

  Args:
    engine: gives `Engine.stats()`.

  Attributes:
    requests: answers by path and status.
    seconds: from a request's headers to the end of its answer, by path.
    first_token: seconds to the first token.
  """

  def __init__(self, engine: Callable[[], Mapping[str, int | float]]):
    self._registry = prometheus_client.CollectorRegistry()
    self.requests = prometheus_client.Counter(
      'glm5_http_requests', 'HTTP requests.', ('path', 'status'), registry=self._registry
    )
    self.seconds = prometheus_client.Histogram(
      'glm5_http_request_seconds', 'Time of an HTTP request.', ('path',), registry=self._registry,
      buckets=_SECONDS,
    )  # fmt: skip
    self.first_token = prometheus_client.Histogram(
      'glm5_first_token_seconds', 'Time to the first token.', registry=self._registry,
      buckets=_SECONDS,
    )  # fmt: skip
    self._registry.register(_EngineCollector(engine))

  def text(self) -> bytes:
    """In Prometheus' text format."""
    return prometheus_client.generate_latest(self._registry)


class _EngineCollector(registry.Collector):
  """The engine counts by itself; its numbers are read when they are asked for."""

  def __init__(self, engine: Callable[[], Mapping[str, int | float]]):
    self._engine = engine

  def collect(self) -> Iterator[core.Metric]:
    stats = self._engine()
    for name, words in _COUNTERS.items():
      yield core.CounterMetricFamily(f'glm5_engine_{name}', words, value=stats[name])
    for name, words in _GAUGES.items():
      yield core.GaugeMetricFamily(f'glm5_engine_{name}', words, value=stats[name])
