"""Requests to a server of WebShop, and the addresses of its site.

    /SESSION                                     the search page; the goal is the number behind the last _ of a session
                                                 that has `fixed` in its name
    /search_results/SESSION/WORDS/PAGE           ten products
    /item_page/SESSION/PRODUCT/WORDS/PAGE/OPTIONS
    /item_sub_page/SESSION/PRODUCT/WORDS/PAGE/NAME/OPTIONS
    /done/SESSION/PRODUCT/OPTIONS                the purchase, with its score

All but the first two are taken from the pages. They hold the whole state of an episode, so asking twice does no harm.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import urllib.parse
from collections.abc import Sequence

from ragen_jax.envs.outside.timed_http import JsonRequests, NoAnswer, in_parts
from ragen_jax.envs.webshop.pages import Page, read_page
from ragen_jax.utils.threads import Fault

LONGEST_SEARCH = 200  # characters
_NOT_SEARCHED = re.compile(r"[^\w\s.,'&+%$-]")
_IN_ADDRESSES = "/%:@!$&'()*+,;=~"


@dataclasses.dataclass(frozen=True)
class SiteSettings:
  """Options of the environment that its site needs, see `WebShopEnvironment`."""

  url: str
  timeout_s: float
  retries: int
  backoff_s: float
  workers: int


class Site:
  """Asks for pages. Several requests are sent at a time, see `in_parts`."""

  def __init__(self, settings: SiteSettings):
    """Sends nothing."""
    self._settings = s = settings
    self._base = s.url.rstrip('/')
    self._requests = JsonRequests(s.timeout_s, s.retries + 1, s.backoff_s)

  def pages(self, addresses: Sequence[str]) -> list[Page | Fault]:
    limits = {'workers': self._settings.workers, 'timeout_s': self._requests.longest_s, 'owner': self}
    return in_parts(addresses, 1, self._ask, what='page', **limits)

  def _ask(self, addresses: Sequence[str]) -> list[Page]:
    return [self._requests.get(addresses[0], lambda body: read_page(body.decode(errors='replace')))]

  def problem(self, goal: int, *, tries: int) -> str:
    """'' if the site has a goal of this number, or why not. It answers with a status of errors for other numbers."""
    requests = dataclasses.replace(self._requests, tries=tries)
    try:
      page = requests.get(self.start(0, goal), lambda body: read_page(body.decode(errors='replace')))
    except NoAnswer as e:
      return str(e)
    return '' if page.has_search else f'{self.start(0, goal)}: the page has no field for search words'

  def start(self, row: int, goal: int) -> str:
    """The address of the first page of a goal. Rows have sessions of their own, and few: the site forgets none."""
    return f'{self._base}/ragen{row}_fixed_{goal}'

  def search(self, row: int, goal: int, words: str) -> str:
    """The address of the results for words, of which `search_words` has left something."""
    quoted = urllib.parse.quote(words, safe='')
    return f'{self._base}/search_results/ragen{row}_fixed_{goal}/{quoted}/1'

  @functools.cached_property
  def _origin(self) -> tuple[str, str]:
    return urllib.parse.urlsplit(self._base)[:2]

  def link(self, target: str) -> str | Fault:
    """The address that a page names; a fault if it leads to another server."""
    address = urllib.parse.urljoin(f'{self._base}/', urllib.parse.quote(target, safe=f'{_IN_ADDRESSES}?#'))
    if urllib.parse.urlsplit(address)[:2] != self._origin:
      return Fault('page names an address of another server', target)
    return address


def search_words(text: str) -> str:
  """The words of a search, as the site can take them; '' if none are left.

  The site's address cannot hold every sign, and gives '<r>', '<a>' and others a meaning.
  """
  return ' '.join(_NOT_SEARCHED.sub(' ', text).lower().split())[:LONGEST_SEARCH].strip('. ')


def chosen_options(address: str) -> dict[str, str]:
  """The options of a product that its address says are chosen; {} for other pages."""
  parts = urllib.parse.urlsplit(address).path.split('/')
  if 'item_page' not in parts:
    return {}
  try:
    found = ast.literal_eval(urllib.parse.unquote(parts[-1]))
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return {}
  return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
