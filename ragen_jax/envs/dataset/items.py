"""Items: the rows of a source as questions with golds, checked while they are read.

`load_items` reads a source once for each set of options; environments of the same options share the items.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from ragen_jax.envs.dataset import selection, sources
from ragen_jax.envs.dataset.item import LETTERS, Item
from ragen_jax.envs.dataset.verifiers import Verifier, VerifierSettings, make_verifier
from ragen_jax.utils.errors import did_you_mean, one_line, short

_log = logging.getLogger(__name__)

FIELDS = ('question', 'answer', 'choices', 'solution', 'group', 'difficulty')
# Golds of which only the verifier's own package can say whether it reads them: so many are read at load.
_CHECKED_GOLDS = 64


@dataclasses.dataclass(frozen=True)
class ItemSettings:
  """Fields of `config.envs.TAG` that decide what the items are. Mappings are JSON, so that settings can be compared.

  Attributes:
    kind: type of the environment, for errors.
    paths: the files of `path`.
    stamps: (size, time of change) of each file, which tell whether it was changed since it was read.
    verifier_settings: what `make_verifier` takes besides the name, as (timeout_s, workers).

  Class attributes, for what users read:
    further: names in `fields` of texts that the verifier reads of the row.
    options: name in `fields` -> the name in the option `fields`, where it is another one.
    word: what a question is called.
    least: what a source must have.
    again: what is said of questions that come again with another gold.
  """

  further: ClassVar[tuple[str, ...]] = ()
  options: ClassVar[Mapping[str, str]] = {}
  word: ClassVar[str] = 'question'
  least: ClassVar[str] = 'one question with its answer'
  again: ClassVar[str] = 'stand there before with another answer; at most one can be right'

  paths: tuple[str, ...]
  stamps: tuple[tuple[int, int], ...]
  generator: str
  generator_options: str
  hub: str
  hub_options: str
  fields: str
  answer_pattern: str
  split: str
  test_share: float
  limit: int
  max_question_chars: int
  bad_rows: str
  verifier: str
  verifier_options: str
  timeout_s: float
  workers: int
  kind: str = 'dataset'

  @property
  def source(self) -> str:
    """The option that names the source, and its value."""
    if self.paths:
      return f'path={", ".join(self.paths)!r}'
    return f'generator={self.generator!r}' if self.generator else f'hub={self.hub!r}'

  @property
  def no_gold(self) -> str:
    """What is said of a gold that cannot be read."""
    return f'is no gold for verifier={self.verifier!r}'

  def make_verifier(self) -> Verifier:
    """A verifier of these options; ValueError if one is not allowed."""
    options, generator_options = json.loads(self.verifier_options), json.loads(self.generator_options)
    settings = VerifierSettings(options, self.timeout_s, self.workers, self.generator, generator_options)
    return make_verifier(self.verifier, settings)


@functools.lru_cache(maxsize=4)  # the tags of a run, whose environments are made for its checks and for its play
def load_items(settings: ItemSettings) -> tuple[Item, ...]:
  """The items of a source: of its split, that are short enough, up to the limit; in the order of the rows.

  Raises:
    ValueError: no item remains, or a row is wrong; one line names the source, the place, the field, and what is
      allowed.
  """
  began = time.monotonic()
  verifier = settings.make_verifier()
  try:
    verifier.check()
    reader = _Reader(settings, verifier)
    items = list(reader.read(_rows(settings)))
    items = tuple(reader.checked(items))
  finally:
    verifier.close()
  if not items:
    raise ValueError(f'{settings.kind}: {settings.source}: {reader.describe_nothing()}')
  reader.report(len(items), time.monotonic() - began)
  return items


def _rows(settings: ItemSettings) -> Iterator[sources.Row]:
  if settings.paths:
    return sources.read_files(settings.paths, settings.kind)
  if settings.generator:
    from ragen_jax.envs.dataset.generators import generate  # needs an optional package

    return generate(settings.generator, json.loads(settings.generator_options))
  return sources.read_hub(settings.hub, json.loads(settings.hub_options), settings.kind)


class _Reader:
  """Reads rows as items, and counts what it leaves out."""

  def __init__(self, settings: ItemSettings, verifier: Verifier):
    self._settings, self._verifier = settings, verifier
    self._fields = {name: field for name, field in json.loads(settings.fields).items() if field}
    self._pattern = re.compile(settings.answer_pattern) if settings.answer_pattern else None
    self._golds: dict[str, int] = {}  # digest of a question -> hash of its answer
    self._places: list[str] = []  # of the first items, for errors about their golds
    self._parts: dict[str, bool] = {}  # digest of a question with a group -> whether it is held out
    self.rows = self.long = self.unread = self.contradicting = self.in_both = 0
    self._first_unread = ''

  def read(self, rows: Iterable[sources.Row]) -> Iterator[Item]:
    settings = self._settings
    kept = 0
    for place, row in rows:
      self.rows += 1
      try:
        item = self._item(place, row)
      except ValueError as e:
        if settings.bad_rows == 'refuse':
          raise
        self.unread += 1
        self._first_unread = self._first_unread or one_line(e, str)
        continue
      if settings.max_question_chars and len(item.text) > settings.max_question_chars:
        self.long += 1
        continue
      if settings.split != 'all' and selection.is_held_out(item.id, settings.test_share) != (settings.split == 'test'):
        continue
      self._note(item)
      if len(self._places) < _CHECKED_GOLDS:
        self._places.append(place)
      kept += 1
      yield item
      if kept == settings.limit:
        return

  def _item(self, place: str, row: Mapping[str, Any]) -> Item:
    question = self._field(place, row, 'question')
    if not isinstance(question, str) or not question.strip():
      raise ValueError(f'{place}: {self._fields["question"]}={short(question)}; allowed: text that is not blank')
    raw = self._field(place, row, 'answer')
    texts = {name: self._text(place, row, name) for name in ('solution', *self._settings.further)}
    choices, labels = self._choices(place, row) if 'choices' in self._fields else ((), ())
    group = _as_group(self._field(place, row, 'group')) if 'group' in self._fields else ''
    field = self._fields['answer']
    if raw is None and self._verifier.needs_answer:
      raise ValueError(f'{place}: {field}=None; allowed: an answer')
    raw = self._matched(place, raw)
    try:
      gold = self._verifier.read_gold(raw, {**row, 'choices': choices, 'choice_labels': labels} if choices else row)
    except ValueError as e:
      raise ValueError(f'{place}: {field}={short(raw)} {self._settings.no_gold}; {e}') from e
    identity = self._verifier.identity(question, gold)
    if group:
      self._note_part(selection.digest(identity), selection.digest(group))
    used = set(self._fields.values())
    extra = {name: value for name, value in row.items() if name not in used} if self._verifier.needs_extra else _NOTHING
    difficulty = self._difficulty(place, row) if 'difficulty' in self._fields else None
    return Item(
      question.strip(), gold, choices, texts['solution'], selection.digest(group or identity), extra, difficulty
    )

  def _text(self, place: str, row: Mapping[str, Any], name: str) -> str:
    """The text of a field that a row may leave empty; '' if the option names none."""
    text = self._field(place, row, name) if name in self._fields else ''
    is_number = name == 'solution' and not self._settings.further  # the solution may be the answer, which may be one
    if is_number and isinstance(text, float) and math.isnan(text):  # of a table
      return ''
    if is_number and isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text):
      return str(int(text) if text == int(text) else text)
    if not isinstance(text, str | None):
      allowed = 'text or a number (fields.solution)' if is_number else 'text'
      raise ValueError(f'{place}: {self._fields[name]}={short(text)}; allowed: {allowed}')
    return text or ''

  def _difficulty(self, place: str, row: Mapping[str, Any]) -> float:
    raw = self._field(place, row, 'difficulty')
    try:
      number = math.nan if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError, OverflowError):
      number = math.nan
    if not math.isfinite(number):
      raise ValueError(f'{place}: {self._fields["difficulty"]}={short(raw)}; allowed: a number, larger if harder')
    return number

  def _field(self, place: str, row: Mapping[str, Any], name: str) -> Any:
    field = self._fields[name]
    if field not in row:
      hint = did_you_mean(field, map(str, row))
      there = ', '.join(one_line(x, str) for x in list(row)[:50]) or 'none'
      option = self._settings.options.get(name, name)
      raise ValueError(f'{place} has no field {field!r} (fields.{option}); {hint}its fields are {there}')
    return row[field]

  def _matched(self, place: str, raw: Any) -> Any:
    if self._pattern is None:
      return raw
    match = self._pattern.search(raw) if isinstance(raw, str) else None
    if match is None or match[1] is None:
      raise ValueError(
        f'{place}: {self._fields["answer"]}={short(raw)} does not match '
        f'answer_pattern={self._settings.answer_pattern!r}'
      )
    return match[1]

  def _choices(self, place: str, row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and labels of the choices: of a list, of {'text': [...], 'label': [...]}, or of label -> text."""
    raw = self._field(place, row, 'choices')
    if isinstance(raw, Mapping) and isinstance(raw.get('text'), list):
      texts, labels = raw['text'], raw.get('label')
    elif isinstance(raw, Mapping):
      texts, labels = list(raw.values()), list(raw)
    else:
      texts, labels = raw, None
    if not isinstance(texts, list | tuple) or not 2 <= len(texts) <= len(LETTERS):
      texts = []
    labels = list(LETTERS[: len(texts)]) if labels is None else labels
    texts = [str(x) if isinstance(x, int | float) else x for x in texts]
    good = texts and all(isinstance(x, str) and x.strip() for x in texts) and isinstance(labels, list)
    if not good or len({str(x) for x in labels}) != len(texts):
      raise ValueError(
        f'{place}: {self._fields["choices"]}={short(raw)}; allowed: a list of 2 to {len(LETTERS)} texts, texts by '
        "label, or {'text': [...], 'label': [...]}"
      )
    return tuple(x.strip() for x in texts), tuple(str(x) for x in labels)

  def _note_part(self, question: str, group: str) -> None:
    """Counts questions that are in both parts of a split, in different groups."""
    if self._settings.split != 'all':
      part = selection.is_held_out(group, self._settings.test_share)
      self.in_both += self._parts.setdefault(question, part) != part

  def _note(self, item: Item) -> None:
    """Counts questions that come again with another gold."""
    gold = hash(repr(self._verifier.answer_of(item.gold)))
    self.contradicting += self._golds.setdefault(selection.digest(item.text), gold) != gold

  def checked(self, items: list[Item]) -> list[Item]:
    """The items whose golds the verifier's package reads, as far as the first ones are tried.

    Raises:
      ValueError: it cannot read one, and such rows are refused.
    """
    reasons = self._verifier.check_golds([item.gold for item in items[:_CHECKED_GOLDS]])
    for i, reason in reasons.items():
      gold = f'{self._places[i]}: {self._fields["answer"]}={short(self._verifier.reference(items[i]))}'
      message = f'{gold} {self._settings.no_gold}; {reason}'
      if self._settings.bad_rows == 'refuse':
        raise ValueError(message)
      self.unread += 1
      self._first_unread = self._first_unread or message
    return [item for i, item in enumerate(items) if i not in reasons]

  def describe_nothing(self) -> str:
    """Why there is no item."""
    if not self.rows:
      return f'has no rows; allowed: at least {self._settings.least}'
    if self.unread == self.rows:
      return f'none of {self.rows:,} rows can be read; the first: {self._first_unread}'
    if self.long + self.unread == self.rows:
      most = self._settings.max_question_chars
      return f'all {self._settings.word}s have more than max_question_chars={most} characters'
    share = f'split={self._settings.split!r} with test_share={self._settings.test_share:g}'
    left = self.rows - self.long - self.unread
    return f'{share} has none of the {left:,} items; allowed: more items, or another test_share or split'

  def report(self, count: int, seconds: float) -> None:
    """Logs what was read and left out."""
    settings, kind, word = self._settings, self._settings.kind, self._settings.word
    part = '' if settings.split == 'all' else f' of split {settings.split!r}'
    _log.info('%s: %s: %d items%s of %d rows, in %.1f s', kind, settings.source, count, part, self.rows, seconds)
    if self.long:
      most = settings.max_question_chars
      message = '%s: %s: %d %ss with more than max_question_chars=%d characters are left out'
      _log.warning(message, kind, settings.source, self.long, word, most)
    if self.unread:
      message = '%s: %s: %d rows that cannot be read are left out; the first: %s'
      _log.warning(message, kind, settings.source, self.unread, self._first_unread)
    if self.contradicting:
      message = '%s: %s: %d %ss %s'
      _log.warning(message, kind, settings.source, self.contradicting, word, settings.again)
    if self.in_both:
      message = '%s: %s: %d %ss are in both parts of the split, in different groups (fields.group)'
      _log.warning(message, kind, settings.source, self.in_both, word)


_NOTHING: Mapping[str, Any] = {}


def _as_group(raw: Any) -> str:
  """The name of a group; '' for none, of which NaN is one in tables. 1.0 is the group 1."""
  if isinstance(raw, float):
    raw = None if math.isnan(raw) else int(raw) if raw.is_integer() else raw
  return '' if raw is None else str(raw).strip()
