"""Fixtures of the HTTP tests: a server whose engine says 'answer 0', 'answer 1', ..."""

from __future__ import annotations

import asyncio
import types

import pytest

from tests.support.scripted import ScriptedEngine, serve
from tests.support.wire import CALL_TAGS, tokenizer


@pytest.fixture(autouse=True)
def _quick_end(monkeypatch):
  """uvicorn looks ten times a second whether it shall end, which was most of the time of these tests."""
  quick = {'sleep': lambda seconds: asyncio.sleep(seconds / 20)}
  monkeypatch.setattr('uvicorn.server.asyncio', types.SimpleNamespace(**vars(asyncio) | quick))


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), CALL_TAGS)


@pytest.fixture
def engine(tok):
  return ScriptedEngine(tok, lambda prompt, number: f'answer {number}')


@pytest.fixture
def server(tmp_path, engine):
  with serve(tmp_path, engine) as opened:
    yield opened
