"""Game files that are found, and files that a generator makes, which is made up here."""

from __future__ import annotations

import copy
import json
import logging
import pathlib
import re

import pytest

from ragen_jax.envs.textworld import library
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line
from tests.support.textworld import story, write_game

# -- files -------------------------------------------------------------------------------------------------------------


def test_games_are_found_in_folders_and_by_patterns_in_the_order_of_their_paths(tmp_path):
  paths = [write_game(tmp_path / name, i) for i, name in enumerate(('b.z8', 'a/[x].z8', 'a/y.z8'))]
  (tmp_path / 'notes.txt').write_text('no game')
  assert [x.path for x in library.find_games(str(tmp_path))] == [paths[1], paths[2], paths[0]]
  assert [x.path for x in library.find_games(f'{tmp_path}/a/*.z8')] == paths[1:]
  assert [x.path for x in library.find_games(paths[0])] == [paths[0]]
  assert len({x.id for x in library.find_games(str(tmp_path))}) == 3


def test_a_home_folder_is_meant_by_its_sign(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  path = write_game(tmp_path / 'games' / 'one.z8', 1)
  assert [x.path for x in library.find_games('~/games')] == [path]


def test_the_identity_of_a_game_is_what_it_is_and_not_how_it_is_told():
  first = library.identity(story(1))
  told = copy.deepcopy(story(1))
  told['world'].reverse()
  told['metadata'] = {'uuid': 'another'}
  told['objective'] = told['quests'][0]['desc'] = 'In other words.'
  told['infos'][0][1]['desc'] = 'A nice box.'
  assert library.identity(told) == first
  for change in ('world', 'infos', 'quests'):
    other = copy.deepcopy(story(1))
    other[change] = story(2)[change]
    assert library.identity(other) != first


def test_a_story_that_changes_is_read_again(tmp_path):
  path = write_game(tmp_path / 'a.z8', 1)
  before = library.find_games(path)[0].id
  write_game(tmp_path / 'a.z8', 22)
  assert library.find_games(path)[0].id != before


@pytest.mark.parametrize(
  ('files', 'path', 'message'),
  [
    (
      (),
      'none',
      r"textworld: path='.*none': has 0 games; allowed: from 1 to 20,000 \.z8 files of a folder, or of a",
    ),
    (
      ('a.ulx',),
      'a.ulx',
      r"a\.ulx': '.*a\.ulx' is no game; allowed: \.z8, which TextWorld makes, each with its \.js",
    ),
    (('a.z8',), '', r"'.*a\.json' cannot be read \(No such file or directory\); a game needs it beside its \.z8"),
    (('a.z8', 'a.json'), '', r"'.*a\.json' does not describe a game of TextWorld \(JSONDecodeError: Expecting value"),
  ],
)
def test_files_that_are_no_games_are_named_in_one_line(files, path, message, tmp_path):
  for name in files:
    (tmp_path / name).write_text('x')
  with raises_one_line(message):
    library.find_games(str(tmp_path / path))


@pytest.mark.parametrize(
  ('text', 'why'),
  [
    ('[]', 'TypeError: '),
    ('{"world": [], "infos": []}', "KeyError: 'quests'"),
    ('{"world": 3, "infos": [], "quests": []}', 'TypeError: '),
  ],
)
def test_a_story_without_its_parts_is_none(text, why, tmp_path):
  (tmp_path / 'a.z8').write_text('')
  (tmp_path / 'a.json').write_text(text)
  with raises_one_line(rf'a\.json. does not describe a game of TextWorld \({why}'):
    library.find_games(str(tmp_path))


# -- the generator -----------------------------------------------------------------------------------------------------


class Generator:
  """In place of the processes: leaves out the games whose seed `is_left_out`, and fails at seed `broken`."""

  is_left_out = staticmethod(lambda seed: False)
  broken = -1
  asked: tuple = ()
  closed = 0

  def __init__(self, factory, *, count, memory_mib, name):
    assert factory.endswith('games.py:Maker') and (count, memory_mib) == (3, 512)

  def map(self, method, arguments, *, timeout_s):
    assert (method, timeout_s) == ('make', 7.0)
    Generator.asked += (tuple(own[2] for own in arguments),)
    return [self._make(*own) for own in arguments]

  def _make(self, folder, name, seed, rooms, objects, quest_length):
    assert (rooms, objects, quest_length) == (2, 4, 3)
    if seed == self.broken:
      return None, Fault('make took longer than 7 s', 'its process was ended')
    if self.is_left_out(seed):
      return 'its walkthrough does not win it', None
    write_game(pathlib.Path(folder) / f'{name}.z8', seed)
    return '', None

  def close(self):
    Generator.closed += 1


@pytest.fixture
def make(tmp_path, monkeypatch):
  monkeypatch.setattr(library, 'Workers', Generator)
  monkeypatch.setattr(library, 'check_package', lambda: '9.8')
  monkeypatch.setattr(Generator, 'asked', ())
  monkeypatch.setattr(Generator, 'closed', 0)

  def run(games, seed=0, cache=tmp_path / 'new' / 'cache'):
    recipe = library.Recipe(games=games, seed=seed, rooms=2, objects=4, quest_length=3, cache=str(cache))
    return library.make_games(recipe, processes=3, memory_mib=512, timeout_s=7.0)

  return run


def test_games_are_made_once_and_others_take_the_place_of_those_left_out(make, monkeypatch, caplog):
  monkeypatch.setattr(Generator, 'is_left_out', staticmethod(lambda seed: seed % 10 in (0, 3)))
  with caplog.at_level(logging.INFO, library.__name__):
    found = make(20, seed=2)
  numbers = [int(re.search(r'seed(\d+)\.z8', x.path).group(1)) - 2_000_000 for x in found]
  assert numbers == [n for n in range(26) if n % 10 not in (0, 3)][:20]
  assert [len(own) for own in Generator.asked] == [16, 8, 2] and Generator.closed == 1
  assert 'textworld9.8_rooms2_objects4_quest3_' in found[0].path
  assert [r.getMessage().split(' are in ')[0] for r in caplog.records] == [
    f'textworld: {n} of 20 games' for n in (12, 18, 20)
  ]  # fmt: skip
  assert make(1, seed=3)[0].id not in {x.id for x in found}
  monkeypatch.setattr(Generator, 'asked', ())
  monkeypatch.setattr(Generator, 'is_left_out', staticmethod(lambda seed: False))
  assert len(make(2, seed=3)) == 2 and Generator.asked == ((3_000_000, 3_000_001),)
  assert len(make(2, seed=3)) == 2 and len(Generator.asked) == 1  # nothing was missing


def test_a_generator_that_wins_too_few_games_is_refused(make, monkeypatch):
  monkeypatch.setattr(Generator, 'is_left_out', staticmethod(lambda seed: seed > 1))
  message = (
    r'rooms=2, objects=4, quest_length=3: 2\d of 2\d games were left out; the last: its walkthrough does not win it'
  )
  with raises_one_line(message):
    make(3)
  assert sum(map(len, Generator.asked)) < 40


def test_a_game_that_takes_too_long_is_refused(make, monkeypatch):
  monkeypatch.setattr(Generator, 'broken', 4)
  with raises_one_line(r'quest_length=3: a game cannot be made \(make took longer.*\); .* make_timeout_s and mem'):
    make(5)
  assert Generator.closed == 1


def test_a_cache_that_cannot_be_made_is_refused(make, tmp_path):
  (tmp_path / 'file').write_text('')
  with raises_one_line(r"textworld: cache='.*file/cache': cannot be made \(Not a directory\)"):
    make(1, cache=tmp_path / 'file' / 'cache')


# -- the package -------------------------------------------------------------------------------------------------------


def test_games_that_were_made_have_stories_and_the_cache_has_nothing_else(made):
  files = sorted(path.name for path in pathlib.Path(made).iterdir() if path.suffix != '.left_out')
  pattern = r'textworld[\d.]+_rooms2_objects3_quest2_seed\d+\.(z8|json)'
  assert len(files) == 4 and all(re.fullmatch(pattern, x) for x in files)
  for path in pathlib.Path(made).glob('*.json'):
    assert len(json.loads(path.read_text())['metadata']['walkthrough']) == 2
  assert len({x.id for x in library.find_games(made)}) == 2
