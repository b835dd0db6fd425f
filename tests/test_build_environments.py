"""What environments need is checked once, before anything is compiled, and named in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from typing import ClassVar

import pytest

from ragen_jax import envs as registry
from ragen_jax.build_environments import check_needs, env_specs
from ragen_jax.config.checks import check_config
from ragen_jax.envs import Session, TextEnvironment
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config

CALLS: list[str] = []
EPISODES: list[int] = []


@dataclasses.dataclass(frozen=True, eq=False)
class Needy(TextEnvironment):
  """Needs what its option says."""

  name: ClassVar[str] = 'needy'
  need: str = ''

  def rules(self) -> str:
    return 'x'

  def open(self, rows: int) -> Session:
    raise NotImplementedError

  def check(self) -> None:
    CALLS.append(self.need)
    if self.need == 'bug':
      raise KeyError('x')
    if self.need:
      raise ValueError(f'{self.need} is missing;\nstart it')

  def check_episodes(self, count: int) -> None:
    EPISODES.append(count)
    if self.need == '' and count > 100:
      raise ValueError(f'{count} are too many')


def _config(train='', evaluation='', **fields):
  config = small_config(**fields)
  budget = {'type': f'{__name__}:Needy', 'max_turns': 1, 'max_actions': 1, 'max_actions_per_turn': 1, 'max_words': 9}
  with config.unlocked():
    config.envs.A, config.envs.B = budget | {'need': train}, budget | {'need': evaluation}
  config.train.tags, config.eval.tags = ('A',), ('B', 'A')
  return config


def test_each_environment_is_checked_once_and_the_tag_is_named():
  CALLS.clear()
  check_config(_config())
  assert CALLS == ['', '']
  with pytest.raises(UserError, match=r'^envs\.A: the server is missing; start it$'):
    check_config(_config(train='the server'))
  with pytest.raises(UserError, match=r'^envs\.B: the server is missing; start it$'):
    check_config(_config(evaluation='the server'))
  with pytest.raises(UserError, match=r"^envs\.B: check failed \(KeyError: 'x'\)$"):
    check_config(_config(evaluation='bug'))


def test_an_environment_learns_how_many_episodes_are_played_at_a_time():
  config = _config()
  train = config.train.groups * config.train.group_size
  config.eval.groups, config.eval.group_size = 2 * train, 3
  EPISODES.clear()
  with contextlib.suppress(UserError):
    check_config(config)
  assert EPISODES[0] == 3 * train  # of A: the larger of all groups of training and half of those of the evaluation
  config.eval.groups = 200
  with pytest.raises(UserError, match=r'^envs\.A: 300 are too many$'):
    check_config(config)


def test_modes_that_play_nothing_need_nothing():
  CALLS.clear()
  check_config(_config(train='a', evaluation='b'), played=())
  config = _config(train='a')
  config.eval.tags = ('B',)
  check_config(config, played=('eval',))
  assert CALLS == ['']


def test_an_environment_that_a_runner_plays_is_checked():
  config = _config(train='the server')
  config.envs.Agent.runner = 'env:A'
  config.train.tags = config.eval.tags = ('Agent',)
  with pytest.raises(UserError, match=r'^envs\.A: the server is missing'):
    check_config(config)


def test_environments_in_jax_need_nothing():
  config = small_config()
  check_needs(env_specs(config, ('FrozenLake', 'Bandit'), (1, 1)))


def test_a_server_that_is_not_there_is_told_of_and_one_that_is_gets_no_request():
  with socket.create_server(('127.0.0.1', 0)) as server:
    url = f'http://127.0.0.1:{server.getsockname()[1]}/games'
    spec = EnvSpec('Far', registry.make('http', {'url': url, 'task': 'x'}), Budget(), 9, 1)
    check_needs([spec])
    connection, _ = server.accept()
    with connection:
      assert connection.recv(10) == b''
  with pytest.raises(UserError, match=rf"^envs\.Far: url='{url}': no server can be reached there \(Connection"):
    check_needs([spec])


@pytest.mark.parametrize(
  ('changes', 'tag'),
  [
    ({}, 'Dataset'),
    ({'envs.Dataset.path': 'a.jsonl'}, 'Dataset'),
    ({'envs.DatasetTest.path': 'b.jsonl'}, 'DatasetTest'),
  ],
)
def test_an_error_names_the_tag_where_the_field_is_set(changes, tag):
  config = small_config(**{name.replace('.', '__'): value for name, value in changes.items()})
  with pytest.raises(UserError, match=rf'^envs\.{tag}: path='):
    check_needs(env_specs(config, ('DatasetTest',), (1,)), envs=config.envs)


def test_a_package_that_is_not_set_is_named_at_its_training_tag():
  config = small_config()
  with pytest.raises(UserError, match=r"^envs\.Verifiers: package=''; allowed: text that is not blank"):
    check_needs(env_specs(config, ('VerifiersTest',), (1,)), envs=config.envs)
