"""Claims that wait."""

from __future__ import annotations

import asyncio
import time
import types

import pytest

pytest.importorskip('starlette')

from ragen_jax.serving.lifecycle import Lifecycle
from ragen_jax.serving.rollout_api import RolloutApi
from ragen_jax.serving.store import Store


def test_a_claim_that_waits_gets_the_next_rollout(tmp_path):
  async def connected() -> bool:
    return False

  http = types.SimpleNamespace(is_disconnected=connected, base_url='http://127.0.0.1:1/')

  async def claim_then_create(api: RolloutApi) -> tuple[dict, dict]:
    waiting = asyncio.create_task(api.claim(http, {'worker': 'w', 'wait_s': 60}))
    while not api._lifecycle.changes._listeners:
      await asyncio.sleep(0)
    created = await api.create(http, {'input': 7})
    return created, await waiting

  with Store(tmp_path / 'agents.sqlite') as store:
    api = RolloutApi(Lifecycle(store, time.time), lambda _: None)
    created, claimed = asyncio.run(asyncio.wait_for(claim_then_create(api), 60))
  assert (claimed['rollout_id'], claimed['input']) == (created['rollout_id'], 7)
  assert claimed['base_url'] == f'http://127.0.0.1:1/attempts/{claimed["attempt_id"]}/v1'
