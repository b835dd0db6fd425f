"""Opens engine, store, service and HTTP server together. Needs the packages of requirements-serve.txt."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.runs.workdir import STORE
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.serving.agent_server import ADMIN_KEY, LOCAL_WORKER, LOOPBACK, AgentServer
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.engine.engines import Engines, FrozenWeights
from ragen_jax.serving.engine.eyes import Eyes
from ragen_jax.serving.http.app import App
from ragen_jax.serving.http.server import HttpServer
from ragen_jax.serving.http.service import ServerSettings, Service
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.utils.errors import UserError


def read_admin_key(host: str) -> str:
  """The admin key of the environment; without one, a random key that nobody has. UserError if other machines can reach
  the server, and there is no key or a short one."""
  key = os.environ.get(ADMIN_KEY, '').strip()
  if key and (len(key) < 16 or not key.isascii() or not key.isprintable() or ' ' in key):
    raise UserError(f'the environment variable {ADMIN_KEY} must have at least 16 printable ASCII characters, no spaces')
  if not key and host not in LOOPBACK:
    raise UserError(f'serve.host={host!r}: other machines can reach it, so {ADMIN_KEY} must be set in the environment')
  return key or secrets.token_urlsafe(32)


@contextlib.contextmanager
def open_server(
  settings: ServerSettings,
  model: LanguageModel,
  params: Any,
  version: int,
  directory: str,
  frozen: Mapping[str, FrozenWeights] = types.MappingProxyType({}),
) -> Iterator[AgentServer]:
  """Opens the store, agents.sqlite in a directory that may be new, and serves a model until the block ends.

  `version` is the number of updates that led to the weights; `frozen` has the weights that `settings.frozen` names.
  UserError if the address, the store or the device cannot be used.
  """
  admin_key = read_admin_key(settings.host)
  if settings.open_access and settings.host not in LOOPBACK:
    raise UserError(f'serve.host={settings.host!r}: calls without a key are allowed on 127.0.0.1 only')
  pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(Store(os.path.join(directory, STORE)))
    lifecycle = Lifecycle(store, time.time)
    lifecycle.recover([LOCAL_WORKER])

    def engine(sampler: Sampler, weights: Any, updates: int, eyes: Eyes | None) -> Engine:
      return stack.enter_context(
        Engine(sampler, model.tokenizer, settings.engine, params=weights, version=updates, eyes=eyes)
      )

    eyes = None
    if settings.limits.images is not None:
      eyes = Eyes(model.encoders['policy'], model.model.policy.cfg.vision)
    policy = engine(model.sampler, params, version, eyes)
    others = {name: engine(own.sampler, own.params, own.version, eyes and own.eyes) for name, own in frozen.items()}
    engines = Engines(policy, others, settings.frozen)
    chat_format = QwenFormat(model.tokenizer, keep_thoughts=settings.keep_thoughts)
    service = Service(settings, engines, lifecycle, model.tokenizer, chat_format)
    app = App(service, admin_key, engines.stats)
    http = stack.enter_context(
      HttpServer(app.asgi, app.stop, settings.host, settings.port, settings.max_connections, settings.max_body)
    )

    def forget(ended: tuple[str, ...]) -> None:
      if ended:  # an attempt ends in any thread; its session belongs to the event loop
        http.call_soon(lambda: [service.forget(attempt) for attempt in ended])

    stack.callback(lifecycle.changes.subscribe(forget))
    yield AgentServer(engines, lifecycle, service, http.url, admin_key)
