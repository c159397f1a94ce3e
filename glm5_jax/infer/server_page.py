"""The page at `/`: one file, allowed by its hashes to run what it holds and nothing else."""

import base64
import hashlib
import importlib.resources
import re

from starlette.responses import Response


class Page:
  """page.html with the Content-Security-Policy that fits it."""

  def __init__(self):
    page = importlib.resources.files('glm5_jax.infer').joinpath('page.html')
    self._html = page.read_text(encoding='utf-8')
    script, style = (_sources(self._html, tag) for tag in ('script', 'style'))
    self._policy = (
      f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src"
      " data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

  def response(self) -> Response:
    headers = {
      'Content-Security-Policy': self._policy,
      'X-Content-Type-Options': 'nosniff',
      'Referrer-Policy': 'no-referrer',
      'Cache-Control': 'no-cache',
    }
    return Response(self._html, media_type='text/html', headers=headers)


def _sources(html: str, tag: str) -> str:
  """The hashes of all inline elements of a kind."""
  found = re.findall(f'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
  digests = (hashlib.sha256(text.encode()).digest() for text in found)
  return ' '.join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
