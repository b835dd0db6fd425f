"""The examples of docs/search.md, as they stand there, and the script that makes a corpus."""

from __future__ import annotations

import ast
import dataclasses
import http.server
import importlib
import json
import pathlib
import re
import sys
import threading

import pytest

from ragen_jax.build_environments import env_specs
from ragen_jax.envs.dataset.bm25 import read_corpus
from ragen_jax.envs.dataset.search import SearchTool
from ragen_jax.envs.dataset.tool_use import make_toolbox
from ragen_jax.envs.dataset.tools import FunctionTool
from tests.support.paths import ROOT
from tools import make_search_corpus

PAGE = (ROOT / 'docs' / 'search.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
FILES = {block.split('\n')[0].removeprefix('# '): block for block in BLOCKS if block.startswith('# ')}


@pytest.fixture
def files(tmp_path, monkeypatch):
  """The page's files, in the current folder and where Python finds them."""
  for path, text in FILES.items():
    (tmp_path / path).write_text(text, encoding='utf-8')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  yield
  for name in [name for name in sys.modules if name.partition('.')[0] in ('my_tools', 'my_server', 'my_search')]:
    del sys.modules[name]


def table(first_header):
  """The rows of the page's table whose first header is this."""
  lines = PAGE[PAGE.index(f'| {first_header} |') :].split('\n\n')[0].split('\n')[2:]
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]


def test_the_page_s_tools_answer_as_its_table_says(files):
  use = make_toolbox(('my_tools.py:calculator', 'my_tools:convert'), {}).open(1)
  rows = table('Call')
  assert len(rows) == 4
  for call, told in rows:
    assert use.step([0], [call.strip('`')])[0].text == told.strip('`')
  for wrong in ('__import__("os")', '2 ** 9', 'x', '1 / 0', '(' * 5000, '9' * 5000, '"a" * 9', '[1, 2]', 'True'):
    (outcome,) = use.step([0], [f'calculator[{wrong}]'])
    assert (outcome.text, outcome.valid) == ('This cannot be computed.', False), wrong


def test_the_page_s_options_make_its_tools(files):
  section = ast.literal_eval(next(block for block in BLOCKS if block.startswith('{')))
  made = make_toolbox(section['tools'], section['tool_options'])
  assert list(made.tools) == ['search', 'calculator']
  only_search = make_toolbox(('search',), {'search': section['tool_options']['search']})
  assert only_search.rules() in re.sub('^ {11}', '', PAGE, flags=re.MULTILINE)  # the lines of the episode's prompt


def test_the_page_lists_the_options_with_their_defaults():
  rows = {name: default for names, default, _ in table('Option') for name, default in _pairs(names, default)}
  search = {field.name: field.default for field in dataclasses.fields(SearchTool)}
  function = {field.name: field.default for field in dataclasses.fields(FunctionTool)}
  common = {'budget', 'max_chars', 'timeout_s'}
  assert set(rows) == {
    *common, *(f'search.{x}' for x in set(search) - common),
    *(f'NAME.{x}' for x in set(function) - common - {'function'}), 'finish.free_text_is_answer',
  }  # fmt: skip
  for name in ('protocol', 'top_k', 'max_passage_chars', 'retries', 'backoff_s', 'workers', 'batch_size'):
    assert ast.literal_eval(rows[f'search.{name}'].strip('`')) == search[name]
  for name in ('budget', 'max_chars'):
    assert int(rows[name]) == search[name] == function[name]
  assert rows['timeout_s'] == f'{function["timeout_s"]:g}; search {search["timeout_s"]:g}'
  assert int(rows['NAME.workers']) == function['workers']


def _pairs(names, defaults):
  names = [name.strip(' `') for name in names.split(',')]
  return zip(names, defaults.split(', ') if len(names) > 1 else [defaults], strict=True)


def test_the_page_s_server_is_searched(files):
  handler = importlib.import_module('my_server').Handler
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    tool = SearchTool(retriever=f'http://127.0.0.1:{server.server_address[1]}', protocol='search_r1')
    tool.check()
    assert tool.call([{'query': 'river italy'}, {'query': 'zebra'}]) == [
      'Passages for "river italy":\n[1] Po\nThe Po is a river in Italy.\n[2] Turin\nTurin is a city on the river Po.',
      'No passage matches "zebra".',
    ]
    server.shutdown()
    thread.join()


def test_the_page_s_passages_are_a_corpus(tmp_path):
  (block,) = re.findall(r'```\n(\{"title".*?)```', PAGE, re.DOTALL)
  (tmp_path / 'corpus.jsonl').write_text(block, encoding='utf-8')
  assert [p.split('\n')[0] for p in read_corpus(tmp_path / 'corpus.jsonl')] == ['Analytical Engine', 'Charles Babbage']


def test_the_page_s_run_has_questions_and_passages_that_fit_its_config(files, monkeypatch):
  (questions,) = re.findall(r'```\n(\{"question".*?)```', PAGE, re.DOTALL)
  pathlib.Path('questions.jsonl').write_text(questions, encoding='utf-8')
  monkeypatch.syspath_prepend(ROOT)
  config = importlib.import_module('my_search').get_config()
  config.envs.Dataset.split = 'all'  # two questions are too few to hold one out
  assert config.envs.DatasetTest.path == 'questions.jsonl'
  assert config.envs.DatasetTest.tool_options.search == config.envs.Dataset.tool_options.search
  (spec,) = env_specs(config, config.train.tags, (1,))
  assert spec.env.item(0).gold and len(spec.env.items) == 2
  assert list(spec.env._toolbox.tools) == ['search']
  assert spec.budget.max_turns == spec.budget.max_actions == config.envs.Dataset.tool_options.search.budget + 1


# -- the script --------------------------------------------------------------------------------------------------------

CONTEXTS = [
  [['Turin', ['A city.', ' It is on the Po. ']], ['Po', ['A river.']]],
  [['Po', ['A river.']], ['Empty', []], ['Po', ['Another\nriver.']]],
]
EXPECTED = ['Turin\nA city. It is on the Po.', 'Po\nA river.', 'Po\nAnother river.']


def of_the_hub(context):
  return {'title': [title for title, _ in context], 'sentences': [sentences for _, sentences in context]}


@pytest.mark.parametrize('form', [list, of_the_hub])
@pytest.mark.parametrize('suffix', ['.json', '.jsonl', '.parquet'])
def test_a_corpus_has_each_passage_of_the_rows_once(tmp_path, form, suffix):
  rows = [{'question': 'q', 'context': form(context)} for context in CONTEXTS]
  source, out = tmp_path / f'rows{suffix}', tmp_path / 'corpus.jsonl'
  if suffix == '.parquet':
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is not installed')
    if form is list:
      pytest.skip('columns of lists have one type')
    importlib.import_module('pyarrow.parquet').write_table(pyarrow.Table.from_pylist(rows), source)
  else:
    source.write_text(json.dumps(rows) if suffix == '.json' else '\n'.join(map(json.dumps, rows)), encoding='utf-8')
  assert make_search_corpus.main([str(out), str(source)]) == f'{out}: 3 passages of 2 rows'
  assert read_corpus(out) == EXPECTED
  assert [json.loads(line)['id'] for line in out.read_text(encoding='utf-8').splitlines()] == ['0', '1', '2']
  assert sorted(p.name for p in tmp_path.iterdir()) == ['corpus.jsonl', f'rows{suffix}']


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    ('rows.csv', 'a', 'rows.csv: in or after row 0: is no .json, .jsonl or .parquet file'),
    ('rows.jsonl', '{"context": []}\n{"context": 3}', 'rows.jsonl: in or after row 2: context is no list of'),
    ('rows.jsonl', '{"context": [["Turin", 3]]}', 'row 1: context is no list of'),
    ('rows.jsonl', '{"context": [["Turin", "A city."]]}', 'row 1: context is no list of'),
    ('rows.jsonl', '{"context": [["Turin", [3]]]}', 'row 1: context is no list of'),
    ('rows.jsonl', '{"context": [["Turin"]]}', 'row 1: context is no list of'),
    ('rows.jsonl', '{"context": {"title": ["a"], "sentences": []}}', 'row 1: context is no list of'),
    ('rows.jsonl', '3', 'row 1: context is no list of'),
    ('rows.jsonl', '{"context": []}\n{', 'rows.jsonl: in or after row 1: Expecting property name'),
    ('rows.json', '{', 'rows.json: in or after row 0: Expecting property name'),
    ('rows.json', '{}', 'rows.json: in or after row 0: is no list of rows'),
  ],
)
def test_rows_without_passages_are_named_and_nothing_is_written(tmp_path, name, text, message):
  (tmp_path / name).write_text(text, encoding='utf-8')
  with pytest.raises(SystemExit, match=re.escape(message)):
    make_search_corpus.main([str(tmp_path / 'corpus.jsonl'), str(tmp_path / name)])
  assert [p.name for p in tmp_path.iterdir()] == [name]
