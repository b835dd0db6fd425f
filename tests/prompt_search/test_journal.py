"""The journal keeps what was added, across ends of the process at any byte."""

from __future__ import annotations

import pytest

from ragen_jax.prompt_search.journal import Journal
from ragen_jax.utils.errors import UserError

HEAD = {'seed': 3, 'tags': ('a', 'b'), 'text': 'é\n'}


def test_results_are_there_after_a_restart(tmp_path):
  journal = Journal(tmp_path / 'new' / 'j.jsonl', HEAD)
  journal.add('score/1', {'tasks': [0.1, 1 / 3]})
  journal.add('edit/1', {'reply': None})
  again = Journal(tmp_path / 'new' / 'j.jsonl', HEAD)
  assert again.find('score/1') == {'tasks': [0.1, 1 / 3]} and again.find('edit/1') == {'reply': None}
  assert again.find('score/2') is None
  with pytest.raises(ValueError, match='score/1 has a result'):
    again.add('score/1', {})


def test_a_process_may_end_at_any_byte(tmp_path):
  path = tmp_path / 'j.jsonl'
  journal = Journal(path, HEAD)
  lengths = [path.stat().st_size]
  for i in range(2):
    journal.add(f'k{i}', {'value': i})
    lengths.append(path.stat().st_size)
  whole = path.read_bytes()
  for cut in range(len(whole) + 1):
    path.write_bytes(whole[:cut])
    opened = Journal(path, HEAD)
    kept = [i for i in range(2) if opened.find(f'k{i}') == {'value': i}]
    assert kept == [i for i in range(2) if cut >= lengths[i + 1]], cut
    opened.add('later', {'value': 9})
    reopened = Journal(path, HEAD)
    assert reopened.find('later') == {'value': 9} and [i for i in range(2) if reopened.find(f'k{i}')] == kept


def test_a_result_is_on_the_disk_when_it_is_added(tmp_path, monkeypatch):
  synced, path = [], tmp_path / 'j.jsonl'
  monkeypatch.setattr('os.fsync', lambda _: synced.append(path.stat().st_size))
  journal = Journal(path, HEAD)
  journal.add('k', {'value': 1})
  assert len(synced) == 2 and synced[-1] == path.stat().st_size


def test_another_search_is_refused(tmp_path):
  Journal(tmp_path / 'j.jsonl', HEAD)
  with pytest.raises(UserError, match=r'belongs to another search: seed was 3 and is 4; choose another --workdir'):
    Journal(tmp_path / 'j.jsonl', HEAD | {'seed': 4})
  with pytest.raises(UserError, match=r'seed was 3 and is null'):
    Journal(tmp_path / 'j.jsonl', {k: v for k, v in HEAD.items() if k != 'seed'})


@pytest.mark.parametrize('content', ['[1, 2]\n', '{"seed": 3}\nnonsense\n', '{}\n["a"]\n', '{}\n{}\n'])
def test_a_damaged_file_is_one_line(tmp_path, content):
  (tmp_path / 'j.jsonl').write_text(content)
  with pytest.raises(UserError) as e:
    Journal(tmp_path / 'j.jsonl', {})
  assert 'j.jsonl' in str(e.value) and '\n' not in str(e.value)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='was not written'):
    Journal(tmp_path / 'file' / 'j.jsonl', HEAD)
