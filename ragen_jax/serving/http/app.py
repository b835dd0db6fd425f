"""HTTP: the routes of the endpoint, with Starlette. `docs/agent_server.md` lists them.

An agent's base address is /attempts/<id>/v1, with the attempt's key; /v1 with the same key is the same. The rollouts
themselves are changed with the admin key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.resources
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ragen_jax.serving import errors
from ragen_jax.serving.engine.settings import EngineStats
from ragen_jax.serving.errors import api_error
from ragen_jax.serving.http import prometheus, rollout_api
from ragen_jax.serving.http.running import Pending
from ragen_jax.serving.http.service import OUTSIDE, Access, Service, request_digest
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.wire import sse
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.body import read_json
from ragen_jax.serving.wire.spec import CallSpec, Kind, header_warnings

# A client hears that its body is too large only after it has sent all of it; so many further bytes are read.
_MOST_DROPPED = 1 << 28
# Requests whose pictures are read at a time.
_MOST_READ = 2
# A whole answer that takes longer begins with white space, so that no time limit for silence ends it.
SILENCE_S = 15.0


class App:
  """The routes of a service."""

  def __init__(
    self, service: Service, admin_key: str, stats: Callable[[], Mapping[str, EngineStats]],
    silence_s: float = SILENCE_S,
  ):  # fmt: skip
    """Makes the routes; `asgi` is the application. An answer that takes longer than `silence_s` says every so many
    seconds that it will come."""
    self._settings, self._service = service.settings, service
    self._admin_key, self._stats, self._silence_s = admin_key, stats, silence_s
    self._reading = asyncio.Semaphore(_MOST_READ)
    self._statuses: dict[tuple[str, int], int] = {}
    self._api = api = rollout_api.RolloutApi(service.lifecycle, service.forget, service.settings)
    calls = {'chat/completions': Kind.CHAT, 'completions': Kind.COMPLETIONS, 'responses': Kind.RESPONSES}
    routes = [self._route(f'{at}/v1/{path}', 'POST', self._call_handler(kind))
              for at in ('', '/attempts/{attempt}') for path, kind in calls.items()]  # fmt: skip
    routes += [
      self._route(f'{at}/v1/models{rest}', 'GET', self._models)
      for at in ('', '/attempts/{attempt}') for rest in ('', '/{model:path}')
    ]  # fmt: skip
    page = importlib.resources.files('ragen_jax.serving.http').joinpath('page.html').read_text(encoding='utf-8')
    routes += [
      self._route('/health', 'GET', self._health),
      self._route('/metrics', 'GET', self._metrics),
      Route('/', lambda _: HTMLResponse(page), methods=['GET']),
      self._route('/rollouts', 'POST', self._admin(api.create)),
      self._route('/rollouts', 'GET', self._admin(api.list)),
      self._route('/rollouts/claim', 'POST', self._admin(api.claim)),
      self._route('/rollouts/{rollout}', 'GET', self._admin(api.get)),
      self._route('/rollouts/{rollout}/cancel', 'POST', self._admin(api.cancel)),
      self._route('/attempts/{attempt}/rewards', 'POST', self._of_attempt(api.reward, for_reward=True)),
      self._route('/attempts/{attempt}/finish', 'POST', self._of_attempt(api.finish, for_reward=True)),
      self._route('/attempts/{attempt}/heartbeat', 'POST', self._of_attempt(api.heartbeat, for_reward=False)),
    ]
    self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})

  def stop(self) -> None:
    """Ends the requests that are open, on the event loop."""
    self._service.stop()
    self._api.stop()

  # -- errors and keys -----------------------------------------------------------------------------------------------

  def _route(self, path: str, method: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
    """A route whose errors have the wire's form."""

    async def answer(http: Request) -> Response:
      try:
        response = await handler(http)
      except ClientDisconnect:
        response = Response(status_code=499)
      except Exception as e:  # noqa: BLE001, whatever it is, the client must be told
        response = _error_response(api_error(e))
      self._statuses[path, response.status_code] = self._statuses.get((path, response.status_code), 0) + 1
      return response

    return Route(path, answer, methods=[method])

  async def _no_route(self, http: Request, error: Exception) -> Response:
    status = getattr(error, 'status_code', 404)
    message = f'{http.method} {http.url.path}: there is no such route'
    return _error_response(dataclasses.replace(errors.not_found(message), status=status))

  def _key(self, http: Request) -> str:
    scheme, _, key = http.headers.get('authorization', '').partition(' ')
    return key.strip() if scheme.lower() == 'bearer' else ''

  def _is_admin(self, http: Request) -> bool:
    return secrets.compare_digest(self._key(http).encode(), self._admin_key.encode())

  def _admin(self, handler: Callable[[Request, dict[str, Any]], Awaitable[Any]]):
    async def answer(http: Request) -> Response:
      if not self._is_admin(http):
        raise errors.unauthorized('this needs the admin key')
      body = await self._body(http) if http.method == 'POST' else {}
      return _json_response(await handler(http, body))

    return answer

  def _of_attempt(self, handler: Callable[[str, dict[str, Any]], Awaitable[Any]], *, for_reward: bool):
    async def answer(http: Request) -> Response:
      attempt_id = http.path_params['attempt']
      if not self._is_admin(http):
        found = await asyncio.to_thread(self._service.lifecycle.authenticate, self._key(http), for_reward)
        if found.attempt_id != attempt_id:
          raise errors.unauthorized(f'the key belongs to another attempt than {attempt_id!r}')
      return _json_response(await handler(attempt_id, await self._body(http)))

    return answer

  async def _access(self, http: Request) -> Access:
    """On whose behalf a call of the policy comes."""
    key, wanted = self._key(http), http.path_params.get('attempt')
    if wanted is None and (self._is_admin(http) or (self._settings.open_access and not key.startswith('rk-'))):
      return OUTSIDE
    lifecycle = self._service.lifecycle

    def find() -> Access:
      attempt = lifecycle.authenticate(key, False)
      if wanted not in (None, attempt.attempt_id):
        raise errors.unauthorized(f'the key belongs to another attempt than {wanted!r}')
      return Access(attempt, lifecycle.store.ask(Tables.rollout, attempt.rollout_id))

    return await asyncio.to_thread(find)

  # -- bodies --------------------------------------------------------------------------------------------------------

  async def _raw(self, http: Request) -> bytes:
    body, size, limit = bytearray(), 0, self._settings.max_body
    async for part in http.stream():  # `TimedProtocol` limits the time
      size += len(part)
      if size <= limit:
        body += part
      elif size > limit + _MOST_DROPPED:
        break
    if size > limit:
      raise errors.too_large(limit)
    return bytes(body)

  async def _body(self, http: Request) -> dict[str, Any]:
    raw = await self._raw(http)
    return read_json(raw, self._settings.max_body) if raw else {}

  # -- calls of the policy -------------------------------------------------------------------------------------------

  def _call_handler(self, kind: Kind) -> Callable[[Request], Awaitable[Response]]:
    async def call(http: Request) -> Response:
      access = await self._access(http)
      raw = await self._raw(http)
      spec = await self._read(kind, raw)
      own_key = http.headers.get('idempotency-key', '')
      repeated = bool(own_key) or http.headers.get('x-stainless-retry-count', '0') not in ('', '0')
      digest = request_digest(str(kind), raw, own_key)
      pending = await self._service.begin(access, spec, digest, repeated=repeated)
      headers = header_warnings(spec, pending.changed) | {'x-request-id': pending.head.id}
      return await (self._stream(pending, headers) if spec.stream else self._whole(http, pending, headers))

    return call

  async def _read(self, kind: Kind, raw: bytes) -> CallSpec:
    """A request; one that may have images in a thread, few at a time, since pictures take time and memory."""
    settings = self._settings

    def read() -> CallSpec:
      return ENDPOINTS[kind].parse(read_json(raw, settings.max_body), settings.limits)

    # JSON may spell a name with escapes.
    if settings.limits.images is None or not (b'image' in raw or b'\\u' in raw):
      return read()
    async with self._reading:
      return await asyncio.to_thread(read)

  async def _stream(self, pending: Pending, headers: dict[str, str]) -> Response:
    stream = ENDPOINTS[pending.spec.kind].stream(self._service.context(pending))

    async def events() -> AsyncIterator[bytes]:
      for event in stream.start(pending.prompts):
        yield event
      try:
        async for news in _with_silences(pending.follow(), self._silence_s):
          if news is None:
            yield sse.KEEP_ALIVE
          elif isinstance(news, tuple):
            for event in stream.piece(*news):
              yield event
          else:
            for event in stream.end(news):
              yield event
      except errors.ApiError as e:
        for event in stream.error(e):
          yield event

    return StreamingResponse(events(), headers=headers | {'cache-control': 'no-store'}, media_type=sse.CONTENT_TYPE)

  async def _whole(self, http: Request, pending: Pending, headers: dict[str, str]) -> Response:
    """The whole answer. If it takes long, the response begins, with white space, before the outcome is known."""

    async def answer() -> bytes:
      choices = await pending.choices()
      return sse.encode_json(ENDPOINTS[pending.spec.kind].answer(self._service.context(pending), choices))

    task = asyncio.create_task(answer())
    gone = asyncio.create_task(_disconnected(http))
    try:
      await asyncio.wait({task, gone}, timeout=self._silence_s, return_when=asyncio.FIRST_COMPLETED)
      if task.done():
        return Response(task.result(), media_type='application/json', headers=headers)
      if gone.done():
        raise ClientDisconnect
    finally:
      gone.cancel()
      if gone.done() and not task.done():
        task.cancel()

    async def padded() -> AsyncIterator[bytes]:
      try:
        while not (await asyncio.wait({task}, timeout=self._silence_s))[0]:
          yield sse.PADDING
        # An error now breaks the connection: the status has been sent, and clients repeat a broken request.
        yield task.result()
      finally:
        task.cancel()

    return StreamingResponse(padded(), media_type='application/json', headers=headers)

  # -- the server ----------------------------------------------------------------------------------------------------

  async def _models(self, http: Request) -> Response:
    await self._access(http)
    name = self._settings.model
    model = {'id': name, 'object': 'model', 'created': 0, 'owned_by': 'ragen-jax'}
    wanted = http.path_params.get('model')
    if wanted is None:
      return _json_response({'object': 'list', 'data': [model]})
    if wanted.partition(':')[0] != name:
      raise errors.not_found(f'model={wanted!r}: must be {name!r}', 'model_not_found')
    return _json_response(model | {'id': wanted})

  async def _health(self, _: Request) -> Response:
    found = self._stats()
    alive = all(s.alive for s in found.values())
    told = {
      name: {
        'policy_version': s.version, 'slots': s.slots, 'slots_used': s.used, 'queued': s.queued, 'paused': s.paused
      }
      for name, s in found.items()
    }  # fmt: skip
    policy = told.pop('')
    status = {'status': 'ok' if alive else 'stopped'}
    return _json_response(status | policy | ({'frozen': told} if told else {}), 200 if alive else 503)

  async def _metrics(self, _: Request) -> Response:
    states = await asyncio.to_thread(self._service.lifecycle.store.ask, Tables.counts)
    text = prometheus.render(self._stats(), self._service.counts, self._statuses, states, self._service.sessions)
    return PlainTextResponse(text, media_type='text/plain; version=0.0.4')


def _json_response(value: Any, status: int = 200) -> Response:
  return Response(sse.encode_json(value), status_code=status, media_type='application/json')


def _error_response(error: errors.ApiError) -> Response:
  body = sse.encode_json(error.body())
  return Response(body, status_code=error.status, media_type='application/json', headers=error.headers())


async def _disconnected(http: Request) -> None:
  """Returns when the client has gone away; its body has been read."""
  while (await http.receive())['type'] != 'http.disconnect':
    pass


async def _with_silences(news: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
  """The items of an iterator, and None whenever none has come for so many seconds."""
  following = None
  try:
    while True:
      following = following or asyncio.ensure_future(anext(news))
      done, _ = await asyncio.wait({following}, timeout=seconds)
      if not done:
        yield None
        continue
      task, following = following, None
      try:
        item = task.result()
      except StopAsyncIteration:
        return
      yield item
  finally:
    if following is not None:
      following.cancel()
      with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, errors.ApiError):
        await following
    await news.aclose()
