"""The built-in model has seen no board that a shipped config evaluates on."""

from __future__ import annotations

import importlib

import pytest

from configs import sft_tiny
from ragen_jax.models import presets
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT


@pytest.fixture(scope='module')
def shared_boards():
  with benchmark('shared_boards') as module:
    yield module


@pytest.fixture(scope='module')
def held_out(shared_boards) -> set[bytes]:
  return shared_boards.held_out_boards()


@pytest.mark.slow
@pytest.mark.parametrize('tag', ['FrozenLake', 'SimpleSokoban'])
def test_no_held_out_board_of_a_shipped_evaluation_was_demonstrated(tag, shared_boards, held_out):
  config = sft_tiny.get_config()
  count = dict(zip(config.sft.tags, config.sft.levels, strict=True))[tag]
  shown = shared_boards.demonstrated_boards(tag, count)
  assert len(shown) > 0.8 * count and len(held_out) > 1000
  assert not held_out & shown


def test_every_shipped_config_that_evaluates_on_a_demonstrated_game_is_skipped():
  config = sft_tiny.get_config()
  names = {path.stem for path in (ROOT / 'configs').glob('*.py')} - {'__init__', 'default', 'environments', 'sft_tiny'}
  models = {name: importlib.import_module(f'configs.{name}').get_config().model.preset for name in names}
  names = {name for name, model in models.items() if model == presets.TINY}
  games = ('frozenlake', 'sokoban', 'bandit')
  assert set(config.sft.skip_held_out_of) == {name for name in names if any(game in name for game in games)}
