"""Tasks of agent programs: lines of a file, or numbers."""

from __future__ import annotations

import pytest

from ragen_jax import envs
from ragen_jax.envs.outside.tasks import AgentTasks
from tests.support.environments import raises_one_line


def test_without_a_file_a_task_is_its_number():
  tasks = AgentTasks()
  assert tasks.task(5, 2) == {'seed': 5, 'member': 2} != tasks.task(5, 1)


def test_a_task_is_a_line_and_lines_are_repeated(tmp_path):
  file = tmp_path / 'tasks.jsonl'
  file.write_text('{"q": "ä"}\n\n[1, 2]\n"x\u2028y"\n', encoding='utf-8')
  tasks = AgentTasks(tasks=str(file))
  expected = [{'q': 'ä'}, [1, 2], 'x\u2028y']
  assert [tasks.task(seed, 0) for seed in range(7)] == (expected * 3)[:7]
  assert tasks.task(1, 0) == tasks.task(1, 9), 'all episodes of a group have one task'


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, r"tasks='.*': cannot be read \(No such file or directory\)"),
    (b'\xff\n', "tasks='.*': is not UTF-8"),
    (b'1\n{\n', r"tasks='.*': line 2 is no JSON \("),
    (b'{"answer": NaN}\n', r"tasks='.*': line 1 is no JSON \("),
    (b'[' * 100_000, r"tasks='.*': line 1 is no JSON \("),
    (b'\n \n', "tasks='.*': has no line with a task"),
  ],
)
def test_a_file_that_has_no_tasks_is_one_line(tmp_path, content, message):
  file = tmp_path / 'tasks.jsonl'
  if content is not None:
    file.write_bytes(content)
  with pytest.raises(ValueError, match=message) as e:
    AgentTasks(tasks=str(file))
  assert '\n' not in str(e.value)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.outside.tasks._LARGEST_FILE', 3)
  (tmp_path / 'tasks').write_text('1234\n')
  with pytest.raises(ValueError, match='is larger than'):
    AgentTasks(tasks=str(tmp_path / 'tasks'))


def test_there_are_no_turns():
  tasks = AgentTasks()
  assert envs.AgentTasks is AgentTasks and tasks.name == 'agent' and tasks.rules()
  with pytest.raises(TypeError, match='not played turn by turn'):
    tasks.open(4)


@pytest.mark.parametrize(('field', 'value'), [('tasks', 7), ('tasks', ('a', 'b')), ('runner', None)])
def test_options_are_text(field, value):
  with raises_one_line(f'agent: {field}=.*; allowed: text'):
    AgentTasks(**{field: value})
