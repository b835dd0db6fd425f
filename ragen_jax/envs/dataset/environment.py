"""The environment of type 'dataset': an episode is a question, and its actions are answers that a verifier decides."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.base import Budget
from ragen_jax.envs.dataset import selection, sources
from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.items import FIELDS, ItemSettings, load_items
from ragen_jax.envs.dataset.tool_use import FINISH, Final, Told, Toolbox, make_toolbox, write_call
from ragen_jax.envs.dataset.verifiers import Verdict, Verifier
from ragen_jax.envs.options import (
  check_choice,
  check_flag,
  check_json,
  check_seconds,
  check_share,
  check_text,
  check_whole_number,
  is_number,
)
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.utils.errors import one_line
from ragen_jax.utils.threads import Fault

ORDERS = ('shuffled', 'fixed')
BAD_ROWS = ('refuse', 'drop')
_MOST_WORKERS = 256
# Name in `fields` -> the field of the rows that it names by default.
_FIELDS = dict.fromkeys(FIELDS, '') | {'question': 'question', 'answer': 'answer'}


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetEnvironment(TextEnvironment):
  """Questions with known answers. docs/datasets.md describes the options for users.

  Making it checks its options and reads no data. The items are read by `check`, or when they are first needed.

  Its options are those of the tag `Dataset` in configs/environments.py, which says what they mean.
  """

  name: ClassVar[str] = 'dataset'
  system: ClassVar[str] = 'You answer questions.'
  counts_turns: ClassVar[bool] = False
  whole_answer: ClassVar[bool] = True
  any_thread: ClassVar[bool] = True

  path: str | tuple[str, ...] = ''
  generator: str = ''
  generator_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  hub: str = ''
  hub_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  answer_pattern: str = ''
  split: str = 'all'
  test_share: float = 0.1
  limit: int = 0
  max_question_chars: int = 0
  bad_rows: str = 'refuse'
  order: str = 'shuffled'
  verifier: str = 'exact'
  verifier_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  attempts: int = 1
  decay: float = 0.5
  tools: tuple[str, ...] = ()
  tool_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tools_format: str = 'text'
  show_verdict: bool = False
  instruction: str = ''
  timeout_s: float = 10.0
  workers: int = 2

  def __post_init__(self):
    for option in ('generator_options', 'hub_options', 'verifier_options', 'tool_options'):
      object.__setattr__(self, option, check_json('dataset', option, getattr(self, option)))
    object.__setattr__(self, 'fields', sources.check_fields(self.fields, _FIELDS))
    object.__setattr__(self, 'path', sources.check_paths(self.path))
    _check_source(self)
    _check_pattern(self.answer_pattern)
    check_choice('dataset', 'split', self.split, selection.SPLITS)
    check_choice('dataset', 'order', self.order, ORDERS)
    check_choice('dataset', 'bad_rows', self.bad_rows, BAD_ROWS)
    for option, least in (('limit', 0), ('max_question_chars', 0), ('attempts', 1), ('workers', 1)):
      check_whole_number('dataset', option, getattr(self, option), least)
    if self.workers > _MOST_WORKERS:
      raise ValueError(f'dataset: workers={self.workers}; allowed: at most {_MOST_WORKERS}')
    check_share('dataset', 'test_share', self.test_share)
    if not is_number(self.decay) or not 0 <= self.decay <= 1:
      raise ValueError(f'dataset: decay={one_line(self.decay)}; allowed: numbers from 0 to 1')
    check_flag('dataset', 'show_verdict', self.show_verdict)
    check_text('dataset', 'instruction', self.instruction)
    check_seconds('dataset', 'timeout_s', self.timeout_s)
    if (self.verifier == 'reasoning_gym') > self.generator.startswith('reasoning_gym:'):
      raise ValueError("dataset: verifier='reasoning_gym'; allowed: with generator='reasoning_gym:NAME'")
    self._verifier  # noqa: B018, its options are checked at once
    object.__setattr__(self, '_toolbox', make_toolbox(self.tools, self.tool_options, self.tools_format))

  @property
  def state_label(self) -> str:
    """What stands above an observation; with tools, only the first observation is the question."""
    return 'Question' if self._toolbox is None else 'Observation'

  # -- what needs no data ----------------------------------------------------------------------------------------------

  @functools.cached_property
  def _verifier(self) -> Verifier:
    return self._settings(()).make_verifier()

  def _settings(self, stamps: tuple[tuple[int, int], ...]) -> ItemSettings:
    """The options that decide what the items are."""
    names = [field.name for field in dataclasses.fields(ItemSettings)]
    values = {name: getattr(self, name) for name in names if hasattr(self, name)}
    values |= {name: json.dumps(value, sort_keys=True) for name, value in values.items() if isinstance(value, dict)}
    return ItemSettings(**values, paths=self.path, stamps=stamps)

  def rules(self) -> str:
    """`instruction`, or a sentence that fits the options; then the lines about the tools."""
    text = self.instruction
    if not text:
      text = 'Choose the right answer.' if self.fields['choices'] else 'Answer the question.'
      text += f' If an answer is wrong, you may try again, {self.attempts} times in all.' * (self.attempts > 1)
    return text if self._toolbox is None else f'{text}\n{self._toolbox.rules(self._finish_help)}'

  @property
  def _finish_help(self) -> str:
    return 'gives your answer' + ('' if self.attempts > 1 else ' and ends the episode')

  @property
  def _in_template(self) -> bool:
    return self._toolbox is not None and self._toolbox.in_template

  @functools.cached_property
  def functions(self) -> tuple[Mapping[str, Any], ...]:
    return tuple(self._toolbox.functions) if self._in_template else ()

  @property
  def typing_help(self) -> str:
    """See `Game`: a person calls tools as a policy does whose rules describe them."""
    return self._toolbox.typing_help(self._finish_help) if self._in_template else ''

  def typed(self, text: str) -> str:
    return self._toolbox.typed(text) if self._in_template else text

  @property
  def action_help(self) -> str:
    """How an answer is written."""
    return self._verifier.answer_help

  def check_budget(self, budget: Budget) -> None:
    """Raises ValueError if the budget ends an episode before its last attempt, or before what a tool found is used."""
    most = min(budget.max_actions, budget.max_turns)
    if self._toolbox is not None and most < 2:
      raise ValueError(
        f'max_turns={budget.max_turns}, max_actions={budget.max_actions} with tools={self.tools}; allowed: at least 2 '
        'each, a call and the answer'
      )
    if self.attempts > most:
      raise ValueError(f'attempts={self.attempts}; allowed: at most {most}, the smaller of max_turns and max_actions')

  # -- what needs the data ---------------------------------------------------------------------------------------------

  @functools.cached_property
  def items(self) -> tuple[Item, ...]:
    """The items, in the order of the source; ValueError, with one line, if it cannot be read."""
    if not (self.path or self.generator or self.hub):
      raise ValueError("dataset: path=''; allowed: a file of questions, such as mine.jsonl")
    stamps = [sources.check_file(path) for path in self.path]
    return load_items(self._settings(tuple((s.st_size, s.st_mtime_ns) for s in stamps)))

  def item(self, seed: int) -> Item:
    return self.items[self.index_of(seed)]

  def index_of(self, seed: int) -> int:
    """The index in `items` of the item that a seed selects."""
    return selection.select(seed, len(self.items), self.order)

  def seed_of(self, index: int) -> int:
    """The smallest seed that selects `items[index]`."""
    return selection.seed_of(index, len(self.items), self.order)

  def level_id(self, seed: int) -> str:
    """The digest of the item's group, or of its question: equal for equal questions in any tag."""
    return self.item(seed).id

  def check(self) -> None:
    """Reads the items; raises ValueError, with one line, if that fails or the verifier lacks a package or a program."""
    self._verifier.check()
    self.items  # noqa: B018
    if self._toolbox is not None:
      self._toolbox.check()

  @property
  def has_expert(self) -> bool:
    """Whether reference answers are known."""
    return self._verifier.has_reference or bool(self.fields['solution'])

  def open(self, rows: int) -> DatasetSession:
    """A session; the items are read at its first reset if they were not before."""
    return DatasetSession(self, self._verifier, self._toolbox, rows)


@dataclasses.dataclass
class _Row:
  """An episode: its item, the graded answers, the best reward so far, and the metrics reported so far."""

  item: Item
  tried: int = 0
  paid: float = 0.0
  reported: dict[str, float] = dataclasses.field(default_factory=dict)


class DatasetSession(Session):
  """Rows that answer questions.

  An episode is over when an answer is right or its attempts are used. The rewards of an episode add up to its best
  score times decay**(k-1), so an answer that is partly right cannot be paid twice. Metrics of the verifier add up to
  those of the last answer.
  """

  def __init__(self, env: DatasetEnvironment, verifier: Verifier, toolbox: Toolbox | None, rows: int):
    self._env, self._verifier = env, verifier
    self._tools = None if toolbox is None else toolbox.open(rows)
    self._rows: list[_Row | None] = [None] * rows

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`: the questions."""
    if self._tools is not None:
      self._tools.reset(rows)
    for row, seed in zip(rows, seeds, strict=True):
      self._rows[row] = _Row(self._env.item(seed))
    label = '' if self._tools is None else 'Question: '
    return [label + self._rows[row].item.text for row in rows]

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """See `Session`: calls the tools, and decides the answers of rows that give one."""
    if self._tools is None:
      return self._grade(rows, actions)
    results: list[Any] = self._tools.step(rows, actions)
    final = [i for i, outcome in enumerate(results) if isinstance(outcome, Final)]
    graded = self._grade([rows[i] for i in final], [results[i].answer for i in final])
    for i, grade in zip(final, graded, strict=True):
      if not isinstance(grade, Fault):
        grade[3]['metrics'].update(results[i].metrics)
      results[i] = grade
    for i, outcome in enumerate(results):
      if isinstance(outcome, Told):
        info = {'success': False, 'effective': outcome.valid, 'metrics': outcome.metrics}
        results[i] = outcome.text, 0.0, False, info
    return results

  def expert(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: the reference answer, as one action; none for an item without."""
    answers = [self._verifier.reference(self._rows[row].item) for row in rows]
    plain = self._tools is None or self._env.functions
    written = answers if plain else [write_call(FINISH, answer) for answer in answers]
    return [[text] if answer.strip() else [] for answer, text in zip(answers, written, strict=True)]

  def rationale(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: the worked solution, unless it is the reference answer itself."""
    items = [self._rows[row].item for row in rows]
    return ['' if self._verifier.reference(item) == item.solution else item.solution for item in items]

  def _grade(self, rows: Sequence[int], answers: Sequence[str]) -> list[Any]:
    """The outcome of one answer of each row."""
    verdicts = self._verifier.score(list(answers), [self._rows[row].item for row in rows])
    return [
      verdict if isinstance(verdict, Fault) else self._answer(self._rows[row], verdict)
      for row, verdict in zip(rows, verdicts, strict=True)
    ]

  def _answer(self, row: _Row, verdict: Verdict) -> tuple[str, float, bool, dict[str, Any]]:
    worth = self._env.decay**row.tried * verdict.score
    reward, row.paid = max(worth - row.paid, 0.0), max(worth, row.paid)
    row.tried += 1
    right, left = verdict.score == 1, self._env.attempts - row.tried
    metrics = {name: verdict.metrics.get(name, 0.0) for name in {*row.reported, *verdict.metrics}}
    change = {name: value - row.reported.get(name, 0.0) for name, value in metrics.items()}
    row.reported = metrics
    info = {'success': right, 'effective': True, 'metrics': {'attempts': 1.0, **change}}
    return self._observation(verdict, right, left), reward, right or left == 0, info

  def _observation(self, verdict: Verdict, right: bool, left: int) -> str:
    if right:
      return 'The answer is right.'
    word = f' ({verdict.verdict})' if self._env.show_verdict and verdict.verdict not in ('', 'wrong') else ''
    text = f'The answer is wrong{word}.'
    return f'{text} Find out why, and give another one; {left} left.' if left > 0 else text


# -- checks of the options ---------------------------------------------------------------------------------------------


def _check_source(env: DatasetEnvironment) -> None:
  """Raises ValueError if more than one source is named, or an option belongs to a source that is not."""
  check_text('dataset', 'generator', env.generator)
  check_text('dataset', 'hub', env.hub)
  named = [x for x in ('path', 'generator', 'hub') if getattr(env, x)]
  if len(named) > 1:
    values = ', '.join(f'{x}={getattr(env, x)!r}' for x in named)
    raise ValueError(f"dataset: {values}; allowed: one of them, the others ''")
  if env.generator and not re.fullmatch(r'reasoning_gym:\w+', env.generator):
    raise ValueError(f"dataset: generator={one_line(env.generator)}; allowed: 'reasoning_gym:NAME'")
  for option, source in (('generator_options', 'generator'), ('hub_options', 'hub')):
    given = getattr(env, option)
    if given and not getattr(env, source) and not env.path:
      raise ValueError(f'dataset: {option}={one_line(given)}; allowed: none without {source}')
  sources.check_hub_options(env.hub_options)


def _check_pattern(value: Any) -> None:
  check_text('dataset', 'answer_pattern', value)
  try:
    groups = re.compile(value).groups if value else 1
  except re.error as e:
    raise ValueError(f'dataset: answer_pattern={value!r}; allowed: a regular expression ({e})') from e
  if groups != 1:
    raise ValueError(f'dataset: answer_pattern={value!r} has {groups} groups; allowed: one, which is the gold')
