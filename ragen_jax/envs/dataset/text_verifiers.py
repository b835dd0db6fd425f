"""Verifiers that compare texts in this process: exact, number, choice and f1."""

from __future__ import annotations

import collections
import math
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.numbers_in_text import Number as ReadNumber
from ragen_jax.envs.dataset.numbers_in_text import boxed, is_equal, number_of, read_number
from ragen_jax.envs.dataset.verifiers import (
  RIGHT,
  WRONG,
  Verdict,
  Verifier,
  VerifierSettings,
  batch,
  check_fraction,
  read_options,
)
from ragen_jax.envs.options import check_choice
from ragen_jax.utils.threads import Fault

# The answer has not the form that the verifier reads. Its metric is the share of such answers.
UNREADABLE = Verdict(0.0, {'unreadable': 1.0}, 'unreadable')


def read_texts(raw: Any) -> tuple[str, ...]:
  """The accepted texts of a gold: a text, a number, a bool, or a list of these; ValueError for anything else.

  NaN, which tables have where a value is missing, is none. In such tables whole numbers are floats: 18.0 is '18'.
  """
  values = raw if isinstance(raw, list | tuple) else [raw]
  values = [int(x) if isinstance(x, float) and x.is_integer() else x for x in values]
  texts = tuple(str(x) for x in values if isinstance(x, str | int) or (isinstance(x, float) and math.isfinite(x)))
  if len(texts) != len(values) or not values or not all(text.strip() for text in texts):
    raise ValueError('allowed: text that is not blank, or a list of texts')
  return texts


def squeezed(text: str) -> str:
  """The text in lower case and without white space, RAGEN's rule for equal answers, after Unicode's form NFC.

  Not NFKC, which makes x² equal to x2.
  """
  return ''.join(unicodedata.normalize('NFC', text).lower().split())


class _OfTexts(Verifier):
  """Compares an answer with one accepted text, or with several."""

  has_reference: ClassVar[bool] = True
  needs_extra: ClassVar[bool] = False

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The accepted texts."""
    del row
    return read_texts(raw)

  def reference(self, item: Item) -> str:
    """The first accepted text."""
    return item.gold[0]


class Exact(_OfTexts):
  """The answer equals the gold, or one of several, in lower case and without white space."""

  answer_help = 'Your answer is compared with the right one letter by letter.'

  def __init__(self, settings: VerifierSettings):
    read_options(settings, {})

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    return batch(answers, items, lambda a, item: RIGHT if squeezed(a) in map(squeezed, item.gold) else WRONG)


class Number(Verifier):
  """The answer contains exactly one number, which equals the gold.

  Option `tolerance`: the largest difference that counts as equal, as a share of the gold; 0 compares exactly.
  """

  answer_help = 'Your answer is one number.'
  has_reference: ClassVar[bool] = True
  needs_extra: ClassVar[bool] = False

  def __init__(self, settings: VerifierSettings):
    self._tolerance = check_fraction('tolerance', read_options(settings, {'tolerance': 0.0})['tolerance'])

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> tuple[ReadNumber, str]:
    """The number, and its text."""
    del row
    number = number_of(raw)
    if number is None:
      raise ValueError('allowed: a number, or text with exactly one number')
    return number, (raw.strip() if isinstance(raw, str) else str(raw))

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    def decide(answer: str, item: Item) -> Verdict:
      number = read_number(answer)
      if number is None:
        return UNREADABLE
      return RIGHT if is_equal(number, item.gold[0], self._tolerance) else WRONG

    return batch(answers, items, decide)

  def reference(self, item: Item) -> str:
    """The gold as it is written."""
    return item.gold[1]


# -- multiple choice ---------------------------------------------------------------------------------------------------

_LONGEST = 4000  # characters of an answer to a question with choices
_LEAD = r'(?:(?:the|my)\s+)?(?:(?:correct|right|best|final)\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*'
_LEADING = re.compile(rf'^{_LEAD}', re.IGNORECASE)
_LETTER = re.compile(rf'(?:{_LEAD})?[(\[]?([a-z])[)\].:]*', re.IGNORECASE)
_LETTER_AND_TEXT = re.compile(rf'(?i:{_LEAD})?[(\[]?([A-Z])(?:[)\]]|[.:)\],]|\s+-)\s*(.+)', re.DOTALL)
_NAMED = re.compile(r"(?<![^\W_])([A-Z])(?![^\W_]|['\u2019][a-z])")
# After the article or the pronoun follows a word in lower case, after a letter for instance 'is'.
_AFTER_A_WORD = re.compile(r'\s+(?!(?:and|or|is|are|as|because|but)\b)[^\W\d_A-Z]')
# A letter in lower case, not of a contraction ("I'd") or an abbreviation ('e.g.').
_SMALL_LETTER = re.compile(r"(?<![^\W_])(?<!['\u2019.])([a-z])(?![^\W_]|['\u2019.][a-z])")
_DENIAL = re.compile(r"\b(?:not|never|neither|nor|no|but|except|other\s+than|cannot|\w+n['\u2019]t)\b", re.IGNORECASE)


# A choice that is computed with: a power, LaTeX, a product such as 2x, an operation on letters.
_FORMULA = re.compile(r'[\\^=]|\d[^\W\d]\b|[^\W\d] ?[*/+] ?\w|\w ?[*/+] ?[^\W\d]')

# What makes a number another one: more digits, an operation, a multiplier.
_AFTER_NUMBER = (
  r'(?![.,/:]\d| ?[*^\u00d7]| ?[-+/\u2212\u2013] ?[\d$]| (?:hundred|thousand|[mb]illion|trillion|dozen|times)\b)'
)


def letter(index: int) -> str:
  """The letter of a choice."""
  return string.ascii_uppercase[index]


def _folded(text: str) -> str:
  """A choice or an answer without letter case, extra blanks, Markdown and a full stop at its end."""
  text = re.sub(r'\*\*|__|`', '', unicodedata.normalize('NFC', text))
  return ' '.join(text.casefold().split()).strip('"\'').rstrip('. ')


def read_choice(answer: str, choices: Sequence[str]) -> int | None:
  """The index of the choice that an answer names; None if it names none or several.

  A letter is read first: alone, with the text of its choice, or as the only capital that stands alone in a sentence
  ('The answer is C'); the words 'A' and 'I' of a sentence are no letters. Otherwise the answer is the text of a choice,
  or a sentence that contains the text of just one. A sentence that denies names none, unless it is the text of the
  choice. Text around a box may not name another choice or deny.
  """
  if len(answer) > _LONGEST:
    return None
  boxes = boxed(answer)
  if len(boxes) == 1:
    around = answer.replace(boxes[0], ' ', 1)
    if _DENIAL.search(around) or _letters(around, choices) or _mentioned(_folded(around), [*map(_folded, choices)]):
      return None
  text = re.sub(r'\*\*|__|`', '', boxes[0] if len(boxes) == 1 else answer).strip()
  texts = [_folded(choice) for choice in choices]
  match = _LETTER.fullmatch(text)
  if match and ord(match[1].upper()) - ord('A') < len(choices):
    return ord(match[1].upper()) - ord('A')
  same = [i for i, choice in enumerate(texts) if choice in (_folded(text), _folded(_LEADING.sub('', text)))]
  if same:
    return same[0] if len(same) == 1 else None
  match = _LETTER_AND_TEXT.fullmatch(text)
  match = match if match and ord(match[1]) - ord('A') < len(choices) else None
  if match and texts[ord(match[1]) - ord('A')] == _folded(match[2]):
    return ord(match[1]) - ord('A')
  # 'There is no change' says what a choice does that is called so.
  denying = '|'.join(re.escape(choice) for choice in texts if ' ' in choice and _DENIAL.search(choice))
  if _DENIAL.search(re.sub(rf'\b(?:{denying})\b', ' ', _folded(text)) if denying else text):
    return None
  if match:
    index, rest = ord(match[1]) - ord('A'), match[2]
  else:
    named = _letters(text, choices, small=False)
    if len(named) > 1:
      return None
    index, rest = (next(iter(named)) if named else None), text
  mentioned = _mentioned(_folded(re.sub(_LEAD, '', rest, flags=re.IGNORECASE)), texts)
  if index is None:
    (named,) = mentioned if len(mentioned) == 1 else (None,)
    return named if named is not None and _is_named(texts[named], _folded(rest)) else None
  return None if (mentioned | _letters(rest, choices)) - {index} else index


def _letters(text: str, choices: Sequence[str], small: bool = True) -> set[int]:
  """The choices whose letters stand alone in a text, in capitals or, with `small`, in lower case."""
  found = [*_NAMED.finditer(text), *(_SMALL_LETTER.finditer(text) if small else ())]
  named = {ord(m[1].upper()) - ord('A') for m in found if not _is_word(text, m)}
  return {i for i in named if i < len(choices)}


def _is_word(text: str, match: re.Match[str]) -> bool:
  """Whether a capital is the article or the pronoun of a sentence."""
  return match[1] in 'AIai' and bool(_AFTER_A_WORD.match(text, match.end()))


def _mentioned(text: str, choices: Sequence[str]) -> set[int]:
  """The choices whose texts stand in a text as whole words, without those that are a part of a longer one."""
  found = {i for i, choice in enumerate(choices) if choice and re.search(rf'(?<!\w){re.escape(choice)}(?!\w)', text)}
  return {i for i in found if not any(i != j and choices[i] in choices[j] for j in found)}


def _is_named(choice: str, text: str) -> bool:
  """Whether a choice that is mentioned stands there for itself.

  A number or a formula not as a part of another ('x' in 'x^2'), a word not behind a hyphen ('linear' in 'non-linear').
  """
  before, after = r'(?<!\w[-\u2010\u2011])', r'(?![-\u2010\u2011]\w)'
  is_formula = bool(_FORMULA.search(choice))
  if re.match(r'\W{0,2}\d', choice) or is_formula:
    before += r'(?<![\d.,/*^+\-\u2212\u2013])(?<![-+*/^\u2212\u2013] )'
    after += _AFTER_NUMBER
  elif len(choice) == 1:
    before, after = r'(?<![*/^+\-])', r'(?! ?[\^*/+\-])'
  if is_formula or re.match(r'\d+/\d', choice):
    before += r'(?<!\d )'  # of a product or a mixed number
  if is_formula:
    after += r'(?! ?[*/^+] ?[\w\\({])(?!-[\w\\({])(?! [-\u2212] (?:\d|\\|\w\b))'
  return bool(re.search(rf'(?<!\w){before}{re.escape(choice)}(?!\w){after}', text))


class Choice(Verifier):
  """The answer names the right one of the item's choices, by its letter or its text.

  Option `gold` tells how the data name the right choice: by 'letter' (or the data's own label), 'index' from 0, or
  'text'. With 'any' a gold that names different choices in different ways is refused.
  """

  answer_help = 'Your answer is the letter of a choice.'
  has_reference: ClassVar[bool] = True
  needs_extra: ClassVar[bool] = False

  def __init__(self, settings: VerifierSettings):
    self._gold = read_options(settings, {'gold': 'any'})['gold']
    check_choice('dataset', 'verifier_options.gold', self._gold, ('any', 'letter', 'index', 'text'))

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> int:
    """The index of the right choice."""
    choices, labels = row.get('choices'), row.get('choice_labels')
    if not choices or labels is None:  # a field of the data, which `fields` does not name
      raise ValueError('verifier choice needs choices; fields.choices must name the field that has them')
    text = str(raw).strip() if isinstance(raw, str | int) and not isinstance(raw, bool) else ''
    letters = [letter(i) for i in range(len(choices))]
    ways = {
      'letter': {names.index(x) for names in (labels, letters) for x in {text, text.upper()} if x in names},
      'index': {int(text)} if re.fullmatch(r'[0-9]{1,2}', text) and int(text) < len(choices) else set(),
      'text': {i for i, choice in enumerate(choices) if text and _folded(choice) == _folded(text)},
    }
    if not isinstance(raw, int) and self._gold == 'any':
      ways['index'] = set()  # digits of a text are a text
    found = set.union(*ways.values()) if self._gold == 'any' else ways[self._gold]
    if len(found) == 1:
      return found.pop()
    if found:
      named = ', '.join(letter(i) for i in sorted(found))
      raise ValueError(f'names several choices, {named}; allowed: one, or verifier_options.gold letter, index or text')
    raise ValueError(f'allowed: a letter from A to {letters[-1]}, an index from 0, or the text of a choice')

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    def decide(answer: str, item: Item) -> Verdict:
      index = read_choice(answer, item.choices)
      if index is None:
        return UNREADABLE
      return RIGHT if index == item.gold else WRONG

    return batch(answers, items, decide)

  def reference(self, item: Item) -> str:
    """The letter."""
    return letter(item.gold)


# -- overlap of words --------------------------------------------------------------------------------------------------

_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_CLOSED = {'yes', 'no', 'noanswer'}  # answers that are right or wrong, and never partly right


def squad_words(text: str) -> list[str]:
  """The words of an answer as the evaluation of SQuAD normalises them: lower case, no punctuation, no a, an, the.

  A text of which this leaves nothing keeps its articles, such as the letter A, or else its punctuation.
  """
  plain = text.lower().translate(_NO_PUNCTUATION)
  return re.sub(r'\b(a|an|the)\b', ' ', plain).split() or plain.split() or text.lower().split()


def f1_score(answer: str, gold: str) -> float:
  """The F1 of two answers as HotpotQA's evaluation defines it: yes, no and noanswer must be equal."""
  words, right = squad_words(answer), squad_words(gold)
  if ' '.join(words) != ' '.join(right) and _CLOSED & {' '.join(words), ' '.join(right)}:
    return 0.0
  common = (collections.Counter(words) & collections.Counter(right)).total()
  # 2PR / (P + R), where P = common / len(words) and R = common / len(right)
  return 2 * common / (len(words) + len(right)) if common else 0.0


class F1(_OfTexts):
  """The overlap of words with the gold, or with the nearest of several; below the option `threshold` it counts as 0.

  Only an answer with all words of the gold and no others is right; other scores are rewards of wrong answers.
  """

  answer_help = 'Your answer is a name, a date, a number or a few words.'

  def __init__(self, settings: VerifierSettings):
    self._threshold = check_fraction('threshold', read_options(settings, {'threshold': 0.3})['threshold'])

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    def decide(answer: str, item: Item) -> Verdict:
      f1 = max(f1_score(answer, gold) for gold in item.gold)
      same = any(squad_words(answer) == squad_words(gold) for gold in item.gold)
      metrics = {'f1': f1, 'exact_match': float(same)}
      return Verdict(f1 if f1 >= self._threshold else 0.0, metrics, 'right' if f1 == 1 else 'wrong')

    return batch(answers, items, decide)
