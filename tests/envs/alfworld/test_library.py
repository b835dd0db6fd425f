"""The games of ALFWorld's data: which are played, in which order, and which are equal. No package is needed."""

from __future__ import annotations

import os
import pathlib

import pytest

from ragen_jax.envs.alfworld import library
from tests.support.alfworld import TASKS, problem, write_game
from tests.support.environments import raises_one_line


def find(folder, split='train', tasks=library.TASKS):
  return library.find_games(str(folder), split, tasks)


def test_the_types_of_tasks_are_those_of_the_games_of_the_tests():
  assert set(library.TASKS) == set(TASKS)


def test_games_come_in_the_order_of_their_paths_whatever_the_order_of_the_folder(tmp_path, monkeypatch):
  train = tmp_path / 'train'
  written = [write_game(train, task, i) for i, task in enumerate(reversed(library.TASKS))]
  first = find(tmp_path)
  assert [x.path for x in first] == sorted(written) and [x.path for x in first] != written
  assert all(pathlib.Path(x.path).parts[-3].startswith(x.task) for x in first)
  scandir = os.scandir

  class Backwards:
    """A folder that is listed in the opposite order."""

    def __init__(self, *args):
      self._own = scandir(*args)

    def __enter__(self):
      return reversed(list(self._own))

    def __exit__(self, *args):
      self._own.close()

    def __iter__(self):
      return iter(reversed(list(self._own)))

  monkeypatch.setattr(os, 'scandir', Backwards)
  assert find(tmp_path) == first
  one = find(tmp_path, tasks=(library.TASKS[2],))
  assert [x.task for x in one] == [library.TASKS[2]]


def test_games_that_alfworld_leaves_out_are_left_out(tmp_path):
  train, task = tmp_path / 'train', library.TASKS[0]
  kept = write_game(train, task, 0)
  write_game(train, task, 1, solvable=False)
  write_game(train, task, 2, solvable=None)
  pathlib.Path(write_game(train, task, 3)).with_name('traj_data.json').unlink()
  write_game(train / 'Sliced', task, 4)
  write_game(train / 'x_movable_y', task, 4)
  about = pathlib.Path(write_game(train, task, 5)).with_name('traj_data.json')
  about.write_text('{"task_type": "pick_and_place_with_movable_recep"}')
  assert [x.path for x in find(tmp_path)] == [kept]
  # Only what is below the part counts.
  assert find(pathlib.Path(write_game(tmp_path / 'Sliced' / 'train', task, 0)).parents[3])


def test_equal_games_have_equal_ids_and_others_do_not(tmp_path):
  task = library.TASKS[0]
  write_game(tmp_path / 'train', task, 0)
  write_game(tmp_path / 'valid_seen', task, 0, trial='another', grammar='in other words UNKNOWN GOAL.')
  for split, changes in {'valid_unseen': {}, 'x': {'cabinets': 3}}.items():
    write_game(tmp_path / split, task, 1 if split == 'valid_unseen' else 0, **changes)
  (train,), (seen,), (unseen,), (larger,) = (
    library.find_games(str(tmp_path), split, library.TASKS) for split in ('train', 'valid_seen', 'valid_unseen', 'x')
  )
  assert train.id == seen.id and len({train.id, unseen.id, larger.id}) == 3
  text = problem(task, 0, name='here')
  commented = text.replace('(:init', '; a comment (define\n(:INIT').replace('(:goal', '\n\n (:goal')
  assert library.identity(text) == library.identity(commented) == train.id
  assert library.identity(text) != library.identity(problem(library.TASKS[4], 0, name='here'))


def test_the_folder_is_the_variable_s_or_the_package_s(tmp_path, monkeypatch):
  monkeypatch.setenv('ALFWORLD_DATA', str(tmp_path))
  assert library.folder_of('') == str(tmp_path / 'json_2.1.1')
  assert library.folder_of('$ALFWORLD_DATA/mine') == str(tmp_path / 'mine')
  monkeypatch.delenv('ALFWORLD_DATA')
  monkeypatch.setenv('HOME', str(tmp_path))
  assert library.folder_of('') == str(tmp_path / '.cache' / 'alfworld' / 'json_2.1.1')
  message = r"^alfworld: path='': '.*train' is no folder, and ALFWORLD_DATA is not set; alfworld-download makes it, see"
  with raises_one_line(message):
    library.find_games('', 'train', library.TASKS)


def test_bad_files_are_named_in_one_line(tmp_path):
  with raises_one_line(r"^alfworld: path='.*': '.*valid_seen' is no folder; alfworld-download makes it, see docs/"):
    find(tmp_path, 'valid_seen')
  (tmp_path / 'train').mkdir()
  with raises_one_line(
    r"has 0 games of tasks=\('pick_two_obj_and_place',\) among 0 files game\.tw-pddl; allowed: from"
  ):
    find(tmp_path, tasks=('pick_two_obj_and_place',))
  game = pathlib.Path(write_game(tmp_path / 'train', library.TASKS[0], 0))
  good = game.read_text()
  for text, message in (
    ('{', r"^alfworld: '.*game\.tw-pddl' is no JSON \(JSONDecodeError"),
    ('[]', r"^alfworld: '.*game\.tw-pddl' and its traj_data\.json do not describe a game \(AttributeError"),
    ('{"solvable": true}', r"describe a game \(KeyError: 'pddl_domain'\)"),
    (good.replace('"walkthrough": null', '"walkthrough": [1]'), 'walkthrough is no list of texts'),
    (good.replace('"grammar": "', '"words": "'), 'KeyError'),
    ('{"solvable": true, "pddl_domain": 1, "grammar": "", "pddl_problem": ""}', 'a field is no text'),
  ):
    game.write_text(text)
    with raises_one_line(message):
      find(tmp_path)
  game.write_bytes(b'\xff')
  with raises_one_line('is not UTF-8 text'):
    find(tmp_path)
  game.write_text(good)
  game.with_name('traj_data.json').write_text('{}')
  with raises_one_line("KeyError: 'task_type'"):
    find(tmp_path)


@pytest.mark.parametrize('missing', library.PACKAGES)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch, missing):
  def version(name):
    if name == missing:
      raise library.importlib.metadata.PackageNotFoundError(name)
    return '1'

  monkeypatch.setattr(library.importlib.metadata, 'version', version)
  with raises_one_line(
    rf"^type='alfworld' needs the package {missing}, which is missing: pip install -r requirements-alfworld\.txt$"
  ):
    library.check_packages()
