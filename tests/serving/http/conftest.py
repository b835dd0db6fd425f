"""Fixtures of the HTTP tests: a server whose engine says 'answer 0', 'answer 1', ..."""

from __future__ import annotations

import pytest

from tests.support.scripted import ScriptedEngine, serve
from tests.support.wire import CALL_TAGS, tokenizer


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
