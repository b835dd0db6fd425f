"""Objects are found by their import path; a wrong path gives one line."""

from __future__ import annotations

import math

from ragen_jax.utils.imports import import_function, import_object
from tests.support.environments import raises_one_line


def test_objects_are_imported_by_their_path():
  assert import_object('type', 'json:JSONDecoder.decode') is __import__('json').JSONDecoder.decode
  assert import_function('reward', 'math:sqrt') is math.sqrt
  for path, message in (
    ('math.sqrt', "^reward='math.sqrt'; allowed: 'package.module:name' or 'file.py:name'$"),
    ('math:', "^reward='math:'; allowed: 'package"),
    (3, "^reward=3; allowed: 'package"),
    ('math:no', r"^reward='math:no' cannot be imported \(AttributeError: .*\); allowed: what Python can import$"),
    ('no_such_module:x', r"^reward='no_such_module:x' cannot be imported \(ModuleNotFoundError"),
    ('math:pi', "^reward='math:pi' is float; allowed: a function$"),
  ):
    with raises_one_line(message):
      import_function('reward', path)


def test_a_module_that_exits_when_it_is_imported_is_an_option_that_cannot_be_used(tmp_path, monkeypatch):
  (tmp_path / 'leaves_at_once.py').write_text('raise SystemExit(4)')
  monkeypatch.syspath_prepend(tmp_path)
  with raises_one_line(r"type='leaves_at_once:Game' cannot be imported \(SystemExit: 4\)"):
    import_object('type', 'leaves_at_once:Game')


def test_a_file_is_run_once_and_again_if_it_failed(tmp_path):
  path = tmp_path / 'my agent.py'
  path.write_text('raise RuntimeError("not yet")')
  with raises_one_line(r"^agent='.*/my agent.py:play' cannot be imported \(RuntimeError: not yet\)"):
    import_function('agent', f'{path}:play')
  path.write_text('class Agent:\n  def play(self): pass\n')
  assert import_object('agent', f'{path}:Agent.play') is import_object('agent', f'{path}:Agent').play
  with raises_one_line(r"^agent='.*/none.py:play' cannot be imported \(FileNotFoundError"):
    import_function('agent', f'{tmp_path}/none.py:play')
