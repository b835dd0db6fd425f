"""Rows of files and of the package datasets; every wrong file is one line that names the place."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_jax.envs.dataset import sources
from tests.support.datasets import make, untimed, write_lines
from tests.support.environments import raises_one_line

ROWS = [{'question': f'{i} + 1? "[ä,]"', 'answer': i + 1, 'more': [{'x': None}]} for i in range(5)]


def rows_of(*paths):
  return [row for _, row in sources.read_files(tuple(map(str, paths)))]


def test_all_files_give_the_same_rows(tmp_path):
  lines, array, columns = (tmp_path / name for name in ('a.jsonl', 'b.json', 'c.JSON'))
  lines.write_bytes(b'\xef\xbb\xbf' + '\n\n'.join(map(json.dumps, ROWS)).encode())
  array.write_text(' \n' + json.dumps(ROWS, indent=1, ensure_ascii=False), encoding='utf-8-sig')
  columns.write_text(json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}))
  assert rows_of(lines) == rows_of(array) == rows_of(columns) == ROWS
  assert rows_of(array, lines) == ROWS + ROWS


def test_a_table_gives_rows_of_texts(tmp_path):
  file = tmp_path / 'x.csv'
  file.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1 + 1, or ""two""?\r\n",2\r\n\r\n\xc3\xa4,\r\n')
  rows = [{'question': '1 + 1, or "two"?\r\n', 'answer': '2'}, {'question': 'ä', 'answer': ''}]
  assert rows_of(file) == rows
  assert [place.rpartition(' ')[2] for place, _ in sources.read_files((str(file),))] == ['3', '5']
  pandas = pytest.importorskip('pandas')
  assert pandas.read_csv(file, dtype=str, keep_default_na=False).to_dict('records') == rows


def test_parquet_gives_the_same_rows(tmp_path):
  pyarrow = pytest.importorskip('pyarrow', reason='needs pyarrow, requirements-data.txt')
  parquet = importlib.import_module('pyarrow.parquet')
  parquet.write_table(pyarrow.Table.from_pylist(ROWS * 100), tmp_path / 'x.parquet')
  assert rows_of(tmp_path / 'x.parquet') == ROWS * 100
  (tmp_path / 'x.parquet').write_bytes(b'PAR1')
  with raises_one_line(r"path='.*x\.parquet': is no parquet \(ArrowInvalid"):
    rows_of(tmp_path / 'x.parquet')


texts = st.text('a"\\[]{},: \n\u00e4\U0001f600', max_size=6)
values = (
  texts | st.integers() | st.none() | st.lists(texts | st.floats(allow_nan=False, allow_infinity=False), max_size=2)
)
rows = st.lists(st.dictionaries(texts, values, max_size=3), max_size=5)


@untimed
@given(rows, st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 9))
def test_an_array_is_read_in_parts_of_any_size(tmp_path_factory, rows, indent, ascii, part):
  file = tmp_path_factory.mktemp('parts') / 'a.json'
  file.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii), encoding='utf-8')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sources, 'CHUNK', part)
    assert rows_of(file) == rows


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.jsonl', None, r"path='.*a\.jsonl': cannot be read \(No such file or directory\)"),
    ('a.txt', b'', r"path='.*a\.txt'; allowed: files that end in \.jsonl, \.json, \.csv, \.parquet"),
    ('a.jsonl', b'{}\n{"question": 1,\n', r'line 2 is no JSON \(Exp.*, column 16\); .*begins .{"question": 1,.$'),
    ('a.jsonl', b'{}\n[1]\n', r'line 2 is \[1\]; allowed: an object'),
    ('a.jsonl', b'{"a": "\xff"}\n', r'line 1 is no JSON|is not UTF-8 text'),
    ('a.jsonl', b'[' * 100_000, 'line 1 is no JSON'),
    ('a.jsonl', b'1' * 5000, 'line 1 is no JSON'),
    ('a.json', b'', "begins with ''; allowed: an array of objects, or an object of columns"),
    ('a.json', b'"x"', "begins with '\"'; allowed"),
    ('a.json', b'[{"a": 1}, {"a": ]', r'item 2 is no JSON \('),
    ('a.json', b'[{"a": 1}', "item 1 is no JSON \\(the file ends\\)"),
    ('a.json', b'[{"a": 1} \n', "after item 1 comes ''; allowed: a comma"),
    ('a.json', b'[{"a": 1} {"a": 2}]', "after item 1 comes '{'; allowed: a comma"),
    ('a.json', b'[{"a": 1}, ', r'item 2 is no JSON \('),
    ('a.json', b'[{"a": 1}]\n[{"a": 2}]', "after the array comes '\\['; allowed: the end of the file"),
    ('a.json', b'[] x', "after the array comes 'x'; allowed: the end of the file"),
    ('a.json', b'[1, 2]', 'item 1 is 1; allowed: an object'),
    ('a.json', b'[{}, {}, 3]', 'item 3 is 3; allowed: an object'),
    ('a.json', b'[{"a": "\xff"}]', r'is not UTF-8 text, byte'),
    ('a.json', b'{"a": [1, 2], "b": [1]}', r"an object with the fields \['a', 'b'\]; allowed: .* arrays of one length"),
    ('a.json', b'{"data": {"x": 1}}', r"fields \['data'\]; allowed: an array of objects"),
    ('a.json', b'{"a": ', r'is no JSON \('),
    ('a.json', b'[' * 100_000, r'item 1 is no JSON \('),
    ('a.csv', b'a,b\n1,2\n3\n', r'line 3: a row of 1 cells; allowed: 2, as the first line names'),
    ('a.csv', b'a,b\n1,2,3\n', r'line 2: a row of 3 cells; allowed: 2'),
    ('a.csv', b'a,b,a\n1,2,3\n', r"the first line is \['a', 'b', 'a'\]; allowed: names of columns that differ"),
    ('a.csv', b'a,b\n1,"2"x\n', r'line 2 is no CSV \('),
    ('a.csv', b'a,b\n1,"2\n', r'line 2 is no CSV \(unexpected end of data\)'),
    ('a.csv', b'a\n' + b'1' * 200_000, r'line 2 is no CSV \(field larger than field limit'),
    ('a.csv', b'a\n\xff\n', r'is not UTF-8 text, byte'),
  ],
)  # fmt: skip
def test_wrong_files_are_one_line(tmp_path, name, content, message):
  file = tmp_path / name
  if content is not None:
    file.write_bytes(content)
  with raises_one_line(message):
    rows_of(file)


def test_a_folder_is_no_file(tmp_path):
  (tmp_path / 'a.jsonl').mkdir()
  with raises_one_line(r"path='.*a\.jsonl': is not a file"):
    rows_of(tmp_path / 'a.jsonl')


def test_files_and_rows_that_are_too_large_are_refused(tmp_path, monkeypatch):
  lines, array, columns = (tmp_path / name for name in ('a.jsonl', 'b.json', 'c.json'))
  write_lines(lines, ROWS)
  array.write_text(json.dumps(ROWS))
  columns.write_text(json.dumps({'a': [1] * 100}))
  monkeypatch.setattr(sources, 'LARGEST_ROW', 60)
  monkeypatch.setattr(sources, 'CHUNK', 16)
  monkeypatch.setattr(sources, 'LARGEST_COLUMNS', 100)
  with raises_one_line('line 1 is longer than 60 bytes'):
    rows_of(lines)
  with raises_one_line('item 1 is longer than 60 characters'):
    rows_of(array)
  with raises_one_line('an object of more than 100 bytes; allowed: an array, or .jsonl'):
    rows_of(columns)
  monkeypatch.setattr(sources, 'LARGEST_FILE', 50)
  with raises_one_line(r"path='.*a\.jsonl': has [\d,]+ bytes; allowed: at most 50"):
    rows_of(lines)


def test_a_large_array_is_never_in_memory_as_a_whole(tmp_path, monkeypatch):
  file = tmp_path / 'a.json'
  file.write_text(json.dumps([{'question': 'x' * 100, 'answer': i} for i in range(2000)]))
  monkeypatch.setattr(sources, 'CHUNK', 1000)
  read = []

  class Decoder(json.JSONDecoder):
    def raw_decode(self, text, at=0):
      read.append(len(text))
      return super().raw_decode(text, at)

  monkeypatch.setattr(json, 'JSONDecoder', Decoder)
  assert len(rows_of(file)) == 2000
  assert max(read) < 4000 < file.stat().st_size / 50


@pytest.mark.parametrize(
  ('package', 'options', 'message'),
  [
    ('pyarrow', {'path': 'x.parquet'}, "path='x.parquet': needs the package pyarrow, which is missing: pip install -r"),
    ('datasets', {'hub': 'a/b'}, "hub='a/b': needs the package datasets, which is missing: pip install -r"),
    (
      'reasoning_gym',
      {'generator': 'reasoning_gym:gcd'},
      'needs the package reasoning-gym, which is missing: pip install',
    ),
  ],
)
def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, package, options, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'x.parquet').write_bytes(b'PAR1')
  monkeypatch.setitem(sys.modules, package, None)
  with raises_one_line(message):
    make(**options).check()


# -- data sets of Hugging Face -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with two splits, which the package loads without a network."""
  pytest.importorskip('datasets', reason='needs datasets, requirements-data.txt')
  for name in ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE', 'HF_DATASETS_DISABLE_PROGRESS_BARS'):
    monkeypatch.setenv(name, '1')
  folder = tmp_path / 'mine'
  folder.mkdir()
  for split, count in (('train', 4), ('test', 2)):
    write_lines(folder / f'{split}.jsonl', [{'question': f'{split} {i}?', 'answer': str(i)} for i in range(count)])
  return str(folder), {'cache_dir': str(tmp_path / 'cache')}


def test_a_local_folder_is_loaded_by_the_real_package(folder):
  hub, options = folder
  env = make(hub=hub, hub_options={**options, 'split': 'test'}, order='fixed')
  env.check()
  assert [(item.question, item.gold) for item in env.items] == [('test 0?', ('0',)), ('test 1?', ('1',))]


def test_data_sets_that_cannot_be_loaded_are_one_line(folder):
  hub, options = folder
  with raises_one_line(r"hub='.*mine': has the splits train, test; hub_options\.split must name one"):
    make(hub=hub, hub_options=options).check()
  with raises_one_line('hub=.* cannot be loaded .*allowed: a data set that is in the local cache'):
    make(hub=hub, hub_options={**options, 'split': 'dev'}).check()
  with raises_one_line('hub=.*nowhere.* cannot be loaded'):
    make(hub=f'{hub}/nowhere', hub_options=options).check()
