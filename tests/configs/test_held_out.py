"""The built-in model has seen no board that a shipped config evaluates on."""

from __future__ import annotations

import importlib
import types

import pytest

from configs import sft_tiny, sft_tiny_vl
from ragen_jax import build
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.config.command_line import load_config
from ragen_jax.models import presets
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT


@pytest.fixture(scope='module')
def shared_boards():
  with benchmark('shared_boards') as module:
    yield module


@pytest.fixture(scope='module')
def held_out(shared_boards) -> dict[str, set[bytes]]:
  return {model: shared_boards.held_out_boards(model) for model in ('tiny', 'tiny-vl')}


@pytest.mark.slow
@pytest.mark.parametrize('model', ['tiny', 'tiny-vl'])
@pytest.mark.parametrize('tag', ['FrozenLake', 'SimpleSokoban'])
@pytest.mark.exhaustive_cases('FrozenLake-tiny', 'SimpleSokoban-tiny')
def test_no_held_out_board_of_a_shipped_evaluation_was_demonstrated(tag, model, shared_boards, held_out):
  sft = shared_boards.MODELS[model].get_config().sft
  count = dict(zip(sft.tags, sft.levels, strict=True))[tag]
  shown = shared_boards.demonstrated_boards(model, tag, count)
  assert len(shown) > 0.8 * count and len(held_out[model]) > 800
  assert not held_out[model] & shown


@pytest.mark.parametrize('model', ['tiny', 'tiny-vl'])
def test_demonstrations_skip_the_boards_that_their_config_names(model, shared_boards, monkeypatch):
  config = shared_boards.MODELS[model].get_config()
  config.eval.tags, config.eval.groups = ('FrozenLake',), 1
  monkeypatch.setattr(shared_boards.MODELS[model], 'get_config', lambda: config)
  evaluated = build.held_out_levels(load_config('frozenlake_vision_ppo', flag=''))
  for skipped in (('frozenlake_vision_ppo',), ()):
    config.sft.skip_held_out_of = skipped
    assert bool(evaluated & shared_boards.demonstrated_boards(model, 'FrozenLake', 2000)) == (not skipped)


def test_boards_of_other_levels_that_were_demonstrated_are_counted(shared_boards, monkeypatch, capsys):
  config = sft_tiny.get_config()
  first, config.sft.tags, config.sft.levels = config.sft.first_level, ('Bandit', 'FrozenLake'), (8, 40)
  config.sft.skip_held_out_of = ()
  monkeypatch.setattr(shared_boards, 'MODELS', {'small': types.SimpleNamespace(get_config=lambda: config)})
  shared_boards.count_demonstrated(first + 30, 25)  # ten of them are demonstrated
  envs = EnvStateManager(build.env_specs(config, ('FrozenLake',), (25,)), 1)
  envs.reset(first + 30)
  boards = envs.levels()
  new = len(boards) - len(boards & shared_boards.demonstrated_boards('small', 'FrozenLake', 40))
  assert 25 > len(boards) - new >= 9 and new >= 9
  bandit, lake = capsys.readouterr().out.splitlines()
  assert bandit == 'small, Bandit: 2 of the 2 boards of these 25 levels were demonstrated'
  assert (
    lake == f'small, FrozenLake: {len(boards) - new} of the {len(boards)} boards of these 25 levels were demonstrated'
  )


def test_every_shipped_config_that_evaluates_on_a_demonstrated_game_is_skipped():
  config = sft_tiny.get_config()
  others = {'__init__', 'default', 'environments', 'sft_tiny', 'sft_tiny_vl'}
  names = {path.stem for path in (ROOT / 'configs').glob('*.py')} - others
  models = {name: importlib.import_module(f'configs.{name}').get_config().model.preset for name in names}
  names = {name for name, model in models.items() if model in presets.BUILT_IN}
  games = ('frozenlake', 'sokoban', 'bandit')
  assert set(config.sft.skip_held_out_of) == {name for name in names if any(game in name for game in games)}
  assert set(sft_tiny_vl.get_config().sft.skip_held_out_of) > set(config.sft.skip_held_out_of)
