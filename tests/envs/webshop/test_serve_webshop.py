"""The start of WebShop's site, with a made-up module in the place of WebShop's."""

from __future__ import annotations

import random
import sys

import pytest

from tools import serve_webshop

_SITE = """
import random, types

goals, ran = None, []


class app:
  @staticmethod
  def test_client():
    def get(path):
      global goals
      goals = [random.random() for _ in range(3)]
      print('noise')
      return types.SimpleNamespace(status_code=STATUS)
    return types.SimpleNamespace(get=get)

  @staticmethod
  def run(**options):
    ran.append(options)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
  def write(status=200):
    folder = tmp_path / 'web_agent_site'
    folder.mkdir()
    (folder / '__init__.py').touch()
    (folder / 'app.py').write_text(_SITE.replace('STATUS', str(status)))
    monkeypatch.chdir(tmp_path)

  monkeypatch.setattr(sys, 'path', list(sys.path))
  state = random.getstate()
  yield write
  random.setstate(state)
  for name in ('web_agent_site', 'web_agent_site.app'):
    sys.modules.pop(name, None)


def test_goals_come_from_the_seed_before_the_first_visitor(site, capsys):
  site()
  serve_webshop.main(['--port=3001', '--seed=7'])
  module = sys.modules['web_agent_site.app']
  assert capsys.readouterr().out == '3 goals: --config.envs.WebShop.goals=3\n'
  assert module.goals == [random.Random(7).random(), *module.goals[1:]]
  assert module.ran == [{'host': '127.0.0.1', 'port': 3001, 'threaded': False}]


def test_a_site_that_cannot_load_ends_the_start(site):
  site(status=500)
  with pytest.raises(SystemExit, match='WebShop cannot load its products: status 500'):
    serve_webshop.main([])


def test_another_folder_is_named_in_one_line(site, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as e:
    serve_webshop.main([])
  assert str(tmp_path) in str(e.value) and '\n' not in str(e.value)
