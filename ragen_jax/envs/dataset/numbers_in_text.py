"""Reads the number in a text that contains exactly one, exactly.

A text with two numbers, with arithmetic around its number or with a word that changes it ('minus', 'million', 'not')
has no number here: a verifier that guesses pays for answers such as '17 18'. A box is read as brackets, with the text
around it, so that '-\\boxed{18}' is -18 and '2\\boxed{18}' is no number.
"""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

_LONGEST = 1000  # characters
# The beginning of a box, and braces.
_BRACE = re.compile(r'\\f?box(?:ed)?\s*\{|[{}]')
# LaTeX for sizes and for the spaces within a number, which means nothing, and for spaces between words.
_NOTHING = re.compile(r'\\[!,]|\\(?:left|right|displaystyle)(?![A-Za-z])')
_SPACE = re.compile(r'\\[;: ]|\\q?quad(?![A-Za-z])|~')
_WORDS_OF_LATEX = re.compile(r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}')
_DEGREES = re.compile(r'\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])')
_DELIMITERS = re.compile(r'\\[()\[\]]')
_PART = r'\s*([+-]?\d[\d,]*(?:\.\d+)?)\s*'
_FRACTION = re.compile(rf'\\[dtc]?frac\s*(?:\{{{_PART}\}}|(\d))\s*(?:\{{{_PART}\}}|(\d))')
# A pair or an interval whose second number has three digits, or a number with a thousands comma: not read.
_PAIR = re.compile(r'[(\[]\s*[+-]?\d{1,3}(?:\s*,\s*\d{3})+(?:\.\d+)?\s*(?:\\right)?\s*[)\]]', re.ASCII)
# Powers of a unit of length: 5 m², 12 cm^2.
_SQUARE = re.compile(
  r'(?<=\d)(\s*(?:[mckd]?m|in|ft|yd|mi|units?|inch(?:es)?|feet|yards?|miles?|met(?:er|re)s?))'
  r'\s*(?:²|³|\^\s*\{?[23]\}?)',
  re.ASCII | re.IGNORECASE,
)
# Words that follow a number and do not change it, although they do elsewhere.
_AFTER_NUMBER = re.compile(
  r'\bleft[ -]?over\b|(?<=\d\s)times(?=\s*\.?\s*$)|'
  r'(?<=\d\s)different(?!\s+(?:from|than|to)\b)(?=\s+[^\W\d_]{2})',
  re.IGNORECASE,
)
# Other signs for minus, and forms of /, % and $.
_PLAIN = str.maketrans(dict.fromkeys('\u2212\u2013\ufe63\uff0d', '-') | {'\u2044': '/', '\uff05': '%', '\uff04': '$'})

_CURRENCY = '$€£¥₹'
_WHOLE = r'(?:[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|\d+)'
_DECIMAL = rf'(?:{_WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?!\d))?'
_NUMBER = re.compile(
  rf'(?:(?P<sign>[+-])(?P<space>[ \t]*))?(?:[{_CURRENCY}]\s*(?P<inner>-)?)?'
  rf'(?:(?P<whole>{_WHOLE})\s+(?=\d+\s*/))?(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>{_DECIMAL}))?(?:\s*(?P<percent>%))?',
  re.ASCII,
)
# Letters directly after a number that are a unit, or make it an ordinal. Others make it a term, as in 2x.
_UNITS = re.compile('st|nd|rd|th|[kcmn]m|[mk]g|ml|mph|kmh|ft|lbs?|oz|min|hrs?|[ap]m|usd|eur', re.IGNORECASE)
# A single letter after a number and a space is a unit, or a variable.
_SHORT_UNITS = frozenset('mgshlLCFNJWVKA')
_MULTIPLIERS = frozenset('mK')  # after an amount of money: millions, thousands
_OPENING, _CLOSING = ' \'"\u2018\u201c([{', '\'"\u2019\u201d)]}'
# Words that change a number, compute with it, or deny it.
_CHANGING = re.compile(
  r'(?<![^\W\d_])(minus|neg(?:ative)?|plus|times|over|divided|multiplied|subtracted|dozens?|hal(f|ves|ved)|'
  r'thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|twelfths?|twentieths?|hundredths?|'
  r'thousandths?|millionths?|(square|cube)\s+of|repeating|recurring|'
  r'twice|thrice|doubled?|tripled?|quadrupled?|squared|cubed|root|sqrt|(opposite|inverse|reciprocal)\s+of|'
  r'hundreds?|thousands?|grand(?!\s+total)|millions?|billions?|trillions?|[bmt]n|[bt]ln|mio|mrd|mil|mill|mln|lakhs?|crores?|'
  r'pi|log|ln|exp|sin|cos|tan|factorial|infinity|mod|or|nor|not|no|none|nothing|neither|never|cannot|cant|wont|'
  r'(is|are|was|were|do|does|did|has|have|had|would|could|should|must)nt?|[^\W\d_]*n[\'\u2018\u2019]t|'
  r'but|except|excepting|excluding|without|unlike|instead|than|at\s+least|at\s+most|far\s+from|wrong|false|untrue|incorrect|'
  r'differs?|different|unequal|zero|'
  r'two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|'
  r'nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?![^\W\d_])',
  re.IGNORECASE,
)
_HARMLESS = set(' \t\n.,:;=?\'"\u2018\u2019\u201c\u201d()[]{}#°-/' + _CURRENCY)
# A hyphen or a slash inside a word or a unit; any other is a sign.
_INSIDE_WORDS = re.compile(r'(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})|(?<=[^\W\d_])/(?=[^\W\d_])|^/(?=[^\W\d_]{3})')
# A number without a sign that is alone in brackets, but is no argument, as in f(3).
_ALONE = rf'\s*((?:[{_CURRENCY}]\s*)?{_DECIMAL}(?:\s*/\s*{_DECIMAL})?(?:\s*%)?)\s*'
_IN_BRACKETS = re.compile(rf'(?<![\w.)\]}}])(?:\({_ALONE}\)|\{{{_ALONE}\}})', re.ASCII)


@dataclasses.dataclass(frozen=True)
class Number:
  """A number as it is written.

  Attributes:
    value: without the sign for percent: 50 for '50%'.
    percent: whether a sign for percent follows.
    undone: whether it is a division that gives a whole number: '36/2'.
  """

  value: Fraction
  percent: bool = False
  undone: bool = False


def read_number(text: str) -> Number | None:
  """The number in a text; None if there is none, if there are several, or if something changes its value.

  Read are signs, thousands commas, decimals, exponents, fractions ('3/4', '1 1/2', LaTeX), a currency, a sign for
  percent, a unit, words around the number, and brackets or a LaTeX box. A sign in front of those belongs to the number.
  """
  if len(text) > _LONGEST:
    return None
  if _PAIR.search(_SPACE.sub('', _NOTHING.sub('', text)).replace('{,}', ',').replace('\\$', '')):
    return None
  text = _clean(text)
  if text is None or any(c.isnumeric() and not c.isascii() for c in text):
    return None
  found = list(_NUMBER.finditer(text))
  if len(found) != 1 or not _stands_alone(text, found[0]):
    return None
  return _value(found[0])


def boxed(text: str) -> list[str]:
  """The contents of the LaTeX boxes of a text, in order; a box that is not closed has none."""
  return [text[start:end] for _, start, end in _boxes(text)]


def _boxes(text: str) -> list[tuple[int, int, int]]:
  """Where each closed box begins, and where its content begins and ends; in order, in one pass."""
  found, opened = [], []
  for match in _BRACE.finditer(text):
    if match[0] != '}':
      opened.append(match)
    elif opened:
      opening = opened.pop()
      if opening[0] != '{':
        found.append((opening.start(), opening.end(), match.start()))
  return sorted(found)


def _clean(text: str) -> str | None:
  """The text without LaTeX and Markdown; None if LaTeX remains whose meaning is not known here."""
  boxes = _boxes(text)
  if len(boxes) > 1:
    return None
  for begin, start, end in boxes:
    text = f'{text[:begin]}({text[start:end]}){text[end + 1 :]}'
  text = text.translate(_PLAIN)
  text = _NOTHING.sub('', text.replace('{,}', ',').replace('\\$', '$').replace('\\%', '%'))
  text = _SPACE.sub(' ', text)
  text = _DEGREES.sub('°', _DELIMITERS.sub(' ', _WORDS_OF_LATEX.sub(r' \1 ', text)))
  text = _FRACTION.sub(lambda m: f' {m[1] or m[2]}/{m[3] or m[4]} ', text)
  text = re.sub(r'\s*\bper\s?cent\b', '%', text, flags=re.IGNORECASE)
  text = _AFTER_NUMBER.sub(' ', _SQUARE.sub(r'\1', text))
  text = re.sub(r'\*\*|__|`', ' ', text)
  return None if '\\' in text else _without_brackets(text)


def _without_brackets(text: str) -> str:
  """The text with its number outside of brackets that contain nothing else; the same text if it has other digits."""
  while match := _IN_BRACKETS.search(text):
    before, after = text[: match.start()], text[match.end() :]
    if re.search(r'\d', before + after):
      break
    text = before + (match[1] or match[2]) + after
  return text


def is_changed_by(around: str) -> bool:
  """Whether text around a number or an expression may compute with it, deny it, or name another one."""
  return bool(_CHANGING.search(around) or re.search(r'[-+*/^<>!±≠¬\d]', _INSIDE_WORDS.sub(' ', around)))


def _stands_alone(text: str, match: re.Match[str]) -> bool:
  """Whether nothing around the number computes with it, denies it, or makes it a part of a name."""
  before, after = text[: match.start()], text[match.end() :]
  if _CHANGING.search(f'{before} {after}'):
    return False
  if any(sign in _INSIDE_WORDS.sub(' ', part) for part in (before, _first_word_joined(after)) for sign in '-/'):
    return False
  # A sign that stands between things is an operation: 'x - 3', 'x-3'.
  if match['sign'] and re.search(r'[\w)\]}]$', before.rstrip() if match['space'] else before):
    return False
  last_word = re.search(r'[^\W\d_]+\s*$', before.rstrip(_OPENING))
  if re.search(r'[\w.]$', before) or re.search(r'\w\($', before) or (last_word and len(last_word[0].strip()) == 1):
    return False  # 'x2', 'f(3)', 'x 3'
  after = after.lstrip(_CLOSING)
  attached = re.match(r'[^\W\d_]+', after)
  if attached and not _UNITS.fullmatch(attached[0]):
    return False
  unit = re.match(r'\s+([^\W\d_])(?![^\W_])', after)
  units = _SHORT_UNITS - _MULTIPLIERS if re.search(f'[{_CURRENCY}]', text) else _SHORT_UNITS
  if (unit and unit[1] not in units) or after.startswith('('):
    return False
  return all(c in _HARMLESS or c.isalpha() for c in before + after)


def _first_word_joined(after: str) -> str:
  """The text after a number, where a hyphen joins the number with a word, as in '5-year', without this hyphen."""
  return re.sub(r'^-(?=[^\W\d_]{2})', ' ', after)


def _value(match: re.Match[str]) -> Number | None:
  """The value of the parts of a number; None for a denominator of 0."""
  whole, top, bottom = (Fraction((match[part] or '0').replace(',', '')) for part in ('whole', 'top', 'bottom'))
  if match['bottom']:
    if not bottom:
      return None
    top /= bottom
  negative = (match['sign'] == '-') != (match['inner'] == '-')
  undone = bool(match['bottom']) and bottom != 1 and top.denominator == 1
  return Number(-(whole + top) if negative else whole + top, bool(match['percent']), undone)


def number_of(value: Any) -> Number | None:
  """The number of a gold: a number of JSON, or a text that contains exactly one."""
  if isinstance(value, str):
    return read_number(value) or _boxed_number(value)
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    return None
  return Number(Fraction(repr(value)))


def _boxed_number(text: str) -> Number | None:
  """The number in the one box of a worked solution; None if what stands before the box may belong to the number."""
  boxes = _boxes(text)
  if len(boxes) != 1:
    return None
  begin, start, end = boxes[0]
  return read_number(text[start:end]) if re.search(r'(?:^|[=:.,]|[^\W\d_]\s)[\s$]*$', text[:begin]) else None


def is_equal(answer: Number, gold: Number, tolerance: float = 0.0) -> bool:
  """Whether two numbers are equal.

  If just one of them has a sign for percent, 50% equals both 50, where the question asks for percent, and 0.5. An
  answer that leaves a division undone, which the question may contain ('144 eggs in boxes of 12'), equals only such a
  gold.

  Args:
    tolerance: largest difference, as a share of the gold's magnitude.
  """
  if answer.undone and not gold.undone:
    return False
  pairs = [(answer.value, gold.value)]
  if answer.percent != gold.percent:
    pairs.append((answer.value / (100 if answer.percent else 1), gold.value / (100 if gold.percent else 1)))
  return any(abs(a - g) <= Fraction(tolerance) * abs(g) for a, g in pairs)
