"""Pages of the WebShop site: their text, what can be clicked, and the score of a purchase.

What is read of a page:

    #instruction-text h4                 the instruction
    #search_input                        a field for search words
    .btn in a form                       a button, whose form names an address
    a.product-link                       a product
    input[type=radio][data-url][value]   an option of a product; `name` is what it is an option of
    #reward pre, #reward_info pre        the score of a purchase, and its parts as Python writes them
"""

from __future__ import annotations

import ast
import dataclasses
import html.parser
import math
import re
from collections.abc import Mapping

# Elements whose text nobody sees, and elements without an end tag.
_UNSEEN = ('head', 'script', 'style', 'title', 'iframe')
_SINGLE = ('area', 'base', 'br', 'col', 'embed', 'hr', 'img', 'input', 'link', 'meta', 'source', 'wbr')
_PARTS = ('r_type', 'r_att', 'r_option', 'r_price')
_SEPARATOR = ' [SEP] '
# Limits of a page, so that reading it takes seconds at most: characters, and elements or tags that are open at a time.
MOST_CHARS = 2**20
MOST_OPEN = 200


class PageError(ValueError):
  """A page is not one of WebShop's."""


@dataclasses.dataclass(frozen=True)
class Page:
  """What is read of a page.

  Attributes:
    texts: the visible texts, in their order.
    instruction: what is to be bought; '' if the page does not say.
    has_search: whether words can be searched for.
    links: name in lower case -> address, of all that can be clicked. An option whose value is also the name of
      something else is named 'option: value'.
    options: name of an option in `links` -> (the option, its value).
    score: of the purchase, if the page is the last one.
    parts: parts of the score by name, as far as the page tells them.
  """

  texts: tuple[str, ...]
  instruction: str
  has_search: bool
  links: Mapping[str, str]
  options: Mapping[str, tuple[str, str]]
  score: float | None
  parts: Mapping[str, float]

  @property
  def text(self) -> str:
    """The visible text, in WebShop's simple form."""
    return _SEPARATOR.join(self.texts)


def plain(text: str) -> str:
  """A name in lower case, with single blanks."""
  return ' '.join(text.split()).lower()


def read_page(source: str) -> Page:
  """What a page says.

  Raises:
    PageError: it has neither an instruction nor a score, its score cannot be read, or it is too large or too deep.
  """
  if len(source) > MOST_CHARS:
    raise PageError(f'the page has {len(source):,} characters, more than {MOST_CHARS:,}')
  if source.count('<', source.rfind('>') + 1) > MOST_OPEN:  # the parser would begin again at each of them
    raise PageError(f'the page has more than {MOST_OPEN} tags at its end that are not closed')
  reader = _Reader()
  reader.feed(source)
  reader.close()
  if reader.score is None and not reader.instruction:
    raise PageError(f'the page has neither an instruction nor a score; it begins {source[:80]!r}')
  links = dict(reader.buttons)
  if reader.has_search:
    links.pop('search', None)  # the button of the field
  values = [plain(value) for _, value, _ in reader.radios]
  options = {}
  for option, value, address in reader.radios:
    name = plain(value)
    if name in reader.buttons or values.count(name) > 1:
      name = f'{plain(option)}: {name}'
    links[name] = address
    options[name] = option, value
  score = None if reader.score is None else _read_score(reader.score)
  return Page(
    tuple(reader.texts), reader.instruction, reader.has_search, links, options, score, _read_parts(reader.parts)
  )


def _read_score(text: str) -> float:
  try:
    score = float(text)
  except ValueError as e:
    raise PageError(f'the score is no number: {text[:80]!r}') from e
  if not math.isfinite(score) or score < 0:
    raise PageError(f'the score is not from 0: {text[:80]!r}')
  return score


def _read_parts(text: str) -> dict[str, float]:
  """The known parts of a score; {} if they cannot be read."""
  try:
    found = ast.literal_eval(text.strip()) if text.strip() else {}
    values = {name: found.get(name) for name in _PARTS} if isinstance(found, dict) else {}
    return {k: float(v) for k, v in values.items() if isinstance(v, bool | int | float) and math.isfinite(v)}
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
    return {}


@dataclasses.dataclass
class _Element:
  """An element that is open.

  Attributes:
    begin: number of pieces of text of the page in front of it.
  """

  tag: str
  attributes: dict[str, str]
  begin: int

  @property
  def classes(self) -> list[str]:
    return self.attributes.get('class', '').split()


class _Reader(html.parser.HTMLParser):
  """Collects what `Page` has while it reads."""

  def __init__(self):
    super().__init__(convert_charrefs=True)
    self.texts: list[str] = []
    self.instruction, self.has_search = '', False
    self.buttons: dict[str, str] = {}
    self.radios: list[tuple[str, str, str]] = []  # (option, value, address)
    self.score: str | None = None
    self.parts = ''
    self._open: list[_Element] = []
    self._unseen = 0  # how many of them are of _UNSEEN
    self._pieces: list[str] = []  # all text of the page

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    element = _Element(tag, {name: value or '' for name, value in attrs}, len(self._pieces))
    if tag == 'input':
      self._read_input(element.attributes)
    if tag in _SINGLE:
      return
    if len(self._open) == MOST_OPEN:
      raise PageError(f'the page has more than {MOST_OPEN} elements within one another')
    self._open.append(element)
    self._unseen += tag in _UNSEEN

  def _read_input(self, attributes: dict[str, str]) -> None:
    self.has_search |= attributes.get('id') == 'search_input'
    if attributes.get('type') == 'radio' and attributes.get('data-url') and attributes.get('value', '').strip():
      self.radios.append((attributes.get('name', ''), attributes['value'], attributes['data-url']))

  def handle_endtag(self, tag: str) -> None:
    # The site closes h4 by h5: headings end headings, and other tags that were not opened are passed over.
    kinds = ('h1', 'h2', 'h3', 'h4', 'h5', 'h6') if re.fullmatch('h[1-6]', tag) else (tag,)
    place = next((i for i in reversed(range(len(self._open))) if self._open[i].tag in kinds), None)
    if place is None:
      return
    for element in reversed(self._open[place:]):
      self._end(element)
      self._open.pop()
      self._unseen -= element.tag in _UNSEEN

  def _end(self, element: _Element) -> None:
    """Reads an element that is whole."""
    is_button = 'btn' in element.classes
    if not is_button and element.tag not in ('a', 'h4', 'pre'):
      return
    whole = ''.join(self._pieces[element.begin :])
    text, form = ' '.join(whole.split()), self._within('form')
    if element.tag == 'a' and 'product-link' in element.classes and text:
      self.buttons[text.lower()] = element.attributes.get('href', '')
    elif is_button and form is not None and text:
      self.buttons[text.lower()] = form.attributes.get('action', '')
    elif element.tag == 'h4' and self._has_id('instruction-text') and not self.instruction:
      self.instruction = text.removeprefix('Instruction:').strip()
    elif element.tag == 'pre' and self._has_id('reward'):
      self.score = text
    elif element.tag == 'pre' and self._has_id('reward_info'):
      self.parts = whole

  def _within(self, tag: str) -> _Element | None:
    return next((element for element in reversed(self._open) if element.tag == tag), None)

  def _has_id(self, name: str) -> bool:
    return any(element.attributes.get('id') == name for element in self._open)

  def handle_data(self, data: str) -> None:
    self._pieces.append(data)
    words = ' '.join(data.split())
    if words and not self._unseen:
      self.texts.append(words)
