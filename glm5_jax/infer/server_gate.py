"""In front of the routes: who may enter, what is counted, and an answer whatever happens."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import time
import urllib.parse
from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5_jax.infer.server_http import error_response, failure
from glm5_jax.infer.server_metrics import Metrics
from glm5_jax.infer.server_requests import ApiError

_OPEN_PATHS = ('/', '/health', '/metrics')  # Served without a key: they tell nobody's text.
_CLIENT_GONE = 499  # Nobody reads it; nginx's number, for the metrics.

_log = logging.getLogger(__name__)


class Gate:
  """An ASGI application around another.

  Args:
    app: what is behind the gate.
    hosts: names in the Host header that are answered; empty answers any.
    api_key: to be sent as a bearer token; empty lets everyone in.
    metrics: counts requests and their time.
    paths: of the routes, the only ones that the metrics tell apart.
  """

  def __init__(
    self,
    app: ASGIApp,
    *,
    hosts: Collection[str],
    api_key: str,
    metrics: Metrics,
    paths: Collection[str],
  ):
    self._app, self._hosts, self._metrics, self._paths = app, hosts, metrics, paths
    self._key = _digest(api_key.encode()) if api_key else None

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    status, complete = 0, False

    async def observed(message: Message) -> None:
      nonlocal status, complete
      status = message.get('status', status)
      complete = message['type'] == 'http.response.body' and not message.get('more_body')
      await send(message)

    started = time.monotonic()
    try:
      self._check(scope)
      await self._app(scope, receive, observed)
    except ApiError as e:
      await error_response(e)(scope, receive, observed)
    except asyncio.CancelledError:
      # Only the end of the server's own patience, when it drains, cancels a request from outside.
      if not status:
        late = ApiError(503, 'the server is shutting down')
        await error_response(late)(scope, receive, observed)
    except Exception:
      _log.exception('%s %s failed', scope['method'], scope['path'])
      if status and not complete:
        raise  # Closes the connection: half an answer must not look like a whole one.
      if not status:
        await error_response(failure())(scope, receive, observed)
    finally:
      path = scope['path'] if scope['path'] in self._paths else 'other'
      self._metrics.requests.labels(path, status).inc()
      self._metrics.seconds.labels(path).observe(time.monotonic() - started)

  def _check(self, scope: Scope) -> None:
    headers = dict(scope['headers'])
    if self._hosts and _name(headers.get(b'host', b'').decode('latin-1')) not in self._hosts:
      # A page whose name was made to point to this machine must not reach it by that name.
      raise ApiError(403, f'this server answers to {", ".join(self._hosts)} only')
    if self._key is None or scope['path'] in _OPEN_PATHS:
      return
    scheme, _, sent = headers.get(b'authorization', b'').partition(b' ')
    if scheme.lower() != b'bearer' or not hmac.compare_digest(_digest(sent.strip()), self._key):
      raise ApiError(
        401,
        'the API key is missing or wrong; send it as "Authorization: Bearer KEY"',
        code='invalid_api_key',
        headers={'WWW-Authenticate': 'Bearer'},
      )


def _digest(key: bytes) -> bytes:
  """Of one length for all keys, so that a comparison tells nothing of it."""
  return hashlib.sha256(key).digest()


def _name(header: str) -> str:
  """The name in a Host header, without its port; '' if there is none."""
  with contextlib.suppress(ValueError):
    return urllib.parse.urlsplit(f'//{header}').hostname or ''
  return ''


def local_names(host: str) -> tuple[str, ...]:
  """Names of a host that only this machine reaches; none if others can reach it."""
  loopback = host == 'localhost'
  with contextlib.suppress(ValueError):
    loopback = ipaddress.ip_address(host).is_loopback
  return tuple(dict.fromkeys(('localhost', '127.0.0.1', '::1', host))) if loopback else ()


async def _on_api_error(_request: Request, error: Exception) -> Response:
  assert isinstance(error, ApiError)
  return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  hints = {
    404: 'there is no such endpoint; docs/serving.md lists them',
    405: f'{request.method} is not what this endpoint takes',
  }
  message = f'{request.url.path}: {hints.get(error.status_code, error.detail)}'
  return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
  return Response(status_code=_CLIENT_GONE)


async def _on_failure(_request: Request, _error: Exception) -> Response:
  return error_response(failure())


HANDLERS = {
  ApiError: _on_api_error,
  HTTPException: _on_http_error,
  ClientDisconnect: _on_disconnect,
  Exception: _on_failure,
}
