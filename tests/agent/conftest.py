"""The built-in tokenizer, and environments that prompts are written for."""

from __future__ import annotations

import pytest

from configs import default
from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.models import presets


@pytest.fixture(scope='session')
def tiny():
  return ChatTokenizer(presets.resolve('tiny', ''))


@pytest.fixture(scope='session')
def specs():
  return build.env_specs(default.get_config(), ('FrozenLake', 'SimpleSokoban', 'Bandit'), (1, 1, 1))
