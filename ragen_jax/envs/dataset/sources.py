"""Rows of data sets, one after another: from files of JSON lines, JSON, CSV and parquet, and from the Hugging Face Hub.

Errors are ValueErrors of one line that name the option, the file, the place and what is allowed. Readers never hold
more than a part of a file, except for a JSON file that is an object of columns.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ragen_jax.envs.dataset.verifiers import INSTALL
from ragen_jax.envs.options import check_mapping
from ragen_jax.utils.errors import describe_error, one_line, short

ENDINGS = ('.jsonl', '.json', '.csv', '.parquet')
# Larger files are refused, and larger rows too: they would be a mistake, or need more memory than a run should take.
LARGEST_FILE = 16 << 30
LARGEST_ROW = 64 << 20
# A JSON object of columns is read whole.
LARGEST_COLUMNS = 1 << 30
CHUNK = 1 << 20  # characters of a JSON file that are read at once
# Arguments of `datasets.load_dataset` that options may set; the others choose rows, or run code.
HUB_OPTIONS = ('name', 'split', 'revision', 'data_dir', 'data_files', 'cache_dir')

# A row, with its place for errors, such as "path='mine.jsonl': line 3".
Row = tuple[str, Mapping[str, Any]]


def read_files(paths: tuple[str, ...], kind: str = 'dataset') -> Iterator[Row]:
  """The rows of several files, one file after another.

  Args:
    kind: type of the environment, for errors.

  Raises:
    ValueError: a file cannot be read, or a row is not an object; while iterating.
  """
  readers = {'.jsonl': _read_lines, '.json': _read_json, '.csv': _read_csv, '.parquet': _read_parquet}
  for path in paths:
    where = f'{kind}: path={path!r}'
    check_file(path, kind)
    try:
      yield from readers[pathlib.Path(path).suffix.lower()](path, where)
    except OSError as e:
      raise ValueError(f'{where}: cannot be read ({e.strerror or one_line(e, str)})') from e
    except UnicodeDecodeError as e:
      raise ValueError(f'{where}: is not UTF-8 text, byte {e.start}') from e


def check_paths(value: Any, kind: str = 'dataset') -> tuple[str, ...]:
  """The files of an option, a tuple or text with commas; ValueError for anything else, or the same file twice."""
  paths = value.split(',') if isinstance(value, str) else value
  if not isinstance(paths, tuple | list) or not all(isinstance(x, str) for x in paths):
    raise ValueError(f'{kind}: path={one_line(value)}; allowed: a file, or several separated by commas')
  paths = tuple(x.strip() for x in paths if x.strip())
  if len(set(paths)) < len(paths):
    raise ValueError(f'{kind}: path={one_line(value)}; allowed: files that differ')
  return paths


def check_file(path: str, kind: str = 'dataset') -> os.stat_result:
  """The status of a data file; ValueError if it is missing, too large, or has another ending."""
  where = f'{kind}: path={path!r}'
  if pathlib.Path(path).suffix.lower() not in ENDINGS:
    raise ValueError(f'{where}; allowed: files that end in {", ".join(ENDINGS)}')
  try:
    status = os.stat(path)
  except OSError as e:
    raise ValueError(f'{where}: cannot be read ({e.strerror})') from e
  if not os.path.isfile(path):
    raise ValueError(f'{where}: is not a file')
  if status.st_size > LARGEST_FILE:
    raise ValueError(f'{where}: has {status.st_size:,} bytes; allowed: at most {LARGEST_FILE:,}')
  return status


def _object(row: Any, place: str) -> Row:
  if not isinstance(row, Mapping):
    raise ValueError(f'{place} is {short(row)}; allowed: an object with fields')
  return place, row


def _read_lines(path: str, where: str) -> Iterator[Row]:
  """The rows of a file with one JSON object a line; blank lines are skipped."""
  with open(path, 'rb') as file:
    number = 0
    while line := file.readline(LARGEST_ROW + 1):
      number += 1
      place = f'{where}: line {number}'
      if len(line) > LARGEST_ROW:
        raise ValueError(f'{place} is longer than {LARGEST_ROW:,} bytes')
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
      line = line.rstrip()
      if not line:
        continue
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as e:
        reason = f'{e.msg}, column {e.colno}' if isinstance(e, json.JSONDecodeError) else one_line(e, str)
        raise ValueError(f'{place} is no JSON ({reason}); its text begins {_begin(line)}') from e
      yield _object(row, place)


def _begin(line: bytes) -> str:
  return one_line(line[:40].decode(errors='replace'))


def _read_json(path: str, where: str) -> Iterator[Row]:
  """The rows of a JSON file: an array of objects, or an object of columns, arrays of equal length."""
  with open(path, encoding='utf-8-sig') as file:
    first = file.read(1)
    while first and first.isspace():
      first = file.read(1)
    if first == '[':
      yield from _read_array(file, where)
      return
    if first != '{':
      raise ValueError(f'{where}: begins with {first!r}; allowed: an array of objects, or an object of columns')
    if os.stat(path).st_size > LARGEST_COLUMNS:
      raise ValueError(f'{where}: an object of more than {LARGEST_COLUMNS:,} bytes; allowed: an array, or .jsonl')
    try:
      columns = json.loads(first + file.read())
    except (ValueError, RecursionError) as e:
      raise ValueError(f'{where}: is no JSON ({one_line(e, str)})') from e
  lengths = {name: len(column) if isinstance(column, list) else None for name, column in columns.items()}
  if None in lengths.values() or len(set(lengths.values())) > 1:
    raise ValueError(
      f'{where}: is an object with the fields {short(list(columns))}; allowed: an array of objects, or an object whose '
      'fields are arrays of one length'
    )
  for i, values in enumerate(zip(*columns.values(), strict=True), 1):
    yield f'{where}: row {i}', dict(zip(columns, values, strict=True))


def _read_array(file: Any, where: str) -> Iterator[Row]:
  """The elements of an array whose bracket has been read, parsed one by one."""
  decoder, text, at, number, size = json.JSONDecoder(), '', 0, 0, CHUNK

  def more() -> bool:
    nonlocal text, at, size
    size = max(CHUNK, len(text) - at)  # twice as much at each try, so that a long element is not parsed too often
    part = file.read(size)
    text, at = text[at:] + part, 0
    if len(text) - len(part) > LARGEST_ROW:
      raise ValueError(f'{where}: item {number + 1} is longer than {LARGEST_ROW:,} characters')
    return bool(part)

  def skip(allowed: str) -> str:
    """The next character that is not blank, which is read if it is allowed; '' at the end."""
    nonlocal at
    while True:
      while at < len(text) and text[at] in ' \t\r\n':
        at += 1
      if at < len(text):
        found = text[at]
        at += found in allowed
        return found
      if not more():
        return ''

  def end_of_file() -> None:
    if rest := skip(''):
      raise ValueError(f'{where}: after the array comes {rest!r}; allowed: the end of the file')

  if skip(']') == ']':
    end_of_file()
    return
  while True:
    skip('')
    try:
      row, end = decoder.raw_decode(text, at)
      is_whole = end < len(text)  # a number could go on
      problem = 'the file ends'
    except (ValueError, RecursionError) as e:  # it may end in the next part
      is_whole, problem = False, one_line(e, str)
    if not is_whole:
      if more():
        continue
      raise ValueError(f'{where}: item {number + 1} is no JSON ({problem})')
    number, at = number + 1, end
    yield _object(row, f'{where}: item {number}')
    after = skip(',]')
    if after == ']':
      end_of_file()
      return
    if after != ',':
      raise ValueError(f'{where}: after item {number} comes {after!r}; allowed: a comma or ]')


def _read_csv(path: str, where: str) -> Iterator[Row]:
  """The rows of a table of texts with commas, whose first line names the columns; blank lines are skipped."""
  with open(path, encoding='utf-8-sig', newline='') as file:
    lines = csv.reader(file, strict=True)
    try:
      names = next(lines, [])
      if len(set(names)) < len(names):
        raise ValueError(f'{where}: the first line is {short(names)}; allowed: names of columns that differ')
      for cells in lines:
        if not cells:
          continue
        place = f'{where}: line {lines.line_num}'
        if len(cells) != len(names):
          raise ValueError(f'{place}: a row of {len(cells)} cells; allowed: {len(names)}, as the first line names')
        yield place, dict(zip(names, cells, strict=True))
    except csv.Error as e:
      raise ValueError(f'{where}: line {lines.line_num} is no CSV ({one_line(e, str)})') from e


def _read_parquet(path: str, where: str) -> Iterator[Row]:
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as e:
    raise ValueError(f'{where}: needs the package pyarrow, which is missing: {INSTALL}') from e
  try:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
      for part in file.iter_batches(batch_size=256):
        for row in part.to_pylist():
          number += 1
          yield _object(row, f'{where}: row {number}')
  except pyarrow.ArrowException as e:
    raise ValueError(f'{where}: is no parquet ({describe_error(e)})') from e


def check_fields(value: Any, defaults: Mapping[str, str], kind: str = 'dataset') -> dict[str, str]:
  """The names of the rows' fields by what they mean, with `defaults`; without a default of '' a name is needed."""
  value = check_mapping(kind, 'fields', value)
  unknown = sorted(set(value) - set(defaults))
  if unknown:
    raise ValueError(f'{kind}: fields.{unknown[0]}={one_line(value[unknown[0]])}; allowed: {", ".join(defaults)}')
  fields = {**defaults, **value}
  for name, field in fields.items():
    if not isinstance(field, str) or (defaults[name] and not field):
      raise ValueError(f'{kind}: fields.{name}={one_line(field)}; allowed: the name of a field of the rows')
  return fields


def check_hub_options(given: Mapping[str, Any], kind: str = 'dataset') -> None:
  """Raises ValueError if one of the options is not in `HUB_OPTIONS`."""
  unknown = sorted(set(given) - set(HUB_OPTIONS))
  if unknown:
    value = one_line(given[unknown[0]])
    raise ValueError(f'{kind}: hub_options.{unknown[0]}={value}; allowed: {", ".join(HUB_OPTIONS)}')


def read_hub(name: str, options: Mapping[str, Any], kind: str = 'dataset') -> Iterator[Row]:
  """The rows of a data set of the Hugging Face Hub, from its cache or the network, or of a local folder.

  Raises:
    ValueError: the package is missing, the data set cannot be loaded, or its split is not named and it has several.
  """
  where = f'{kind}: hub={name!r}'
  try:
    import datasets
  except ImportError as e:
    raise ValueError(f'{where}: needs the package datasets, which is missing: {INSTALL}') from e
  try:
    found = datasets.load_dataset(name, **options)
  except Exception as e:  # the package raises many kinds, also those of its network libraries
    raise ValueError(
      f'{where} with hub_options={one_line(dict(options))} cannot be loaded ({describe_error(e)[:300]}); allowed: '
      'a data set that is in the local cache or can be downloaded, or a local folder of data files'
    ) from e
  if isinstance(found, Mapping):
    if len(found) > 1:
      raise ValueError(f'{where}: has the splits {", ".join(map(str, found))}; hub_options.split must name one')
    (found,) = found.values()
  for number, row in enumerate(found, 1):
    yield _object(row, f'{where}: row {number}')
