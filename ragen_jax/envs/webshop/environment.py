"""The environment of type 'webshop': a goal is an instruction to buy something, on the site of a WebShop server."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.base import Budget
from ragen_jax.envs.dataset import selection
from ragen_jax.envs.options import check_choice, check_flag, check_seconds, check_url, check_whole_number
from ragen_jax.envs.outside.base import Session, TextEnvironment, floored
from ragen_jax.envs.webshop.pages import Page, plain
from ragen_jax.envs.webshop.site import Site, SiteSettings, chosen_options, search_words
from ragen_jax.utils.threads import Fault

# Part -> its first goal, and the first goal that is no more in it; None for the end. WebShop's own division.
PARTS: Mapping[str, tuple[int, int | None]] = {
  'all': (0, None), 'train': (1500, None), 'validation': (500, 1500), 'test': (0, 500)
}  # fmt: skip
REWARDS = ('success', 'raw')
_ACTION = re.compile(r'\s*(search|click)\s*\[(.*)\]\s*', re.IGNORECASE | re.DOTALL)
# A search, a product, the purchase.
_LEAST_ACTIONS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class WebShopEnvironment(TextEnvironment):
  """Shopping by searches and clicks. docs/webshop.md describes the options for users.

  Making it checks its options and asks no server.

  Its options are those of the tag `WebShop` in configs/environments.py, which says what they mean.
  """

  name: ClassVar[str] = 'webshop'
  system: ClassVar[str] = 'You shop on a web site.'
  state_label: ClassVar[str] = 'Page'
  any_thread: ClassVar[bool] = True
  has_legal_actions: ClassVar[bool] = True
  action_help: ClassVar[str] = 'An action is search[words] or click[name], such as click[buy now].'

  url: str = 'http://127.0.0.1:3000'
  goals: int = 0
  split: str = 'all'
  reward: str = 'success'
  show_actions: bool = True
  timeout_s: float = 60.0
  retries: int = 3
  backoff_s: float = 0.5
  workers: int = 8

  def __post_init__(self):
    check_url('webshop', 'url', self.url)
    check_choice('webshop', 'split', self.split, tuple(PARTS))
    check_choice('webshop', 'reward', self.reward, REWARDS)
    check_flag('webshop', 'show_actions', self.show_actions)
    for option, least in (('goals', 0), ('retries', 0), ('workers', 1)):
      check_whole_number('webshop', option, getattr(self, option), least)
    for option in ('timeout_s', 'backoff_s'):
      check_seconds('webshop', option, getattr(self, option))
    first, _ = PARTS[self.split]
    if self.goals and self.goals <= first:
      raise ValueError(
        f'webshop: goals={self.goals} with split={self.split!r}; allowed: above {first}, where this part begins'
      )
    settings = SiteSettings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(SiteSettings)})
    object.__setattr__(self, '_site', Site(settings))

  def rules(self) -> str:
    pays = {
      'success': 'Only a purchase that fits it in all points pays 1',
      'raw': 'The better it fits, the more it pays, at most 1',
    }
    text = (
      'Buy a product that fits the instruction: search for products, open one, choose its options and buy it. '
      f'{pays[self.reward]}. The purchase ends the episode.'
    )
    return text + ' Each page ends with the actions that are possible.' * bool(self.show_actions)

  def parse_action(self, text: str) -> str | None:
    """The action with the words that the site can take; None for other texts, and for a search without words."""
    match = _ACTION.fullmatch(text)
    if match is None:
      return None
    verb = match[1].lower()
    words = search_words(match[2]) if verb == 'search' else plain(match[2])
    return f'{verb}[{words}]' if words else None

  def example_actions(self, observation: str) -> tuple[str, ...]:
    del observation
    return ('search[words]', 'click[name]')

  def check_budget(self, budget: Budget) -> None:
    """Raises ValueError if an episode has too few actions for a purchase."""
    if budget.most_actions < _LEAST_ACTIONS:
      raise ValueError(
        f'max_turns={budget.max_turns}, max_actions={budget.max_actions}; allowed: at least {_LEAST_ACTIONS} actions, '
        'which a purchase takes'
      )

  # -- the goals -------------------------------------------------------------------------------------------------------

  def goal(self, seed: int) -> int:
    """The number of the goal of a seed; ValueError if `goals` is not set."""
    if not self.goals:
      raise ValueError(
        'webshop: goals=0; allowed: the number of goals of the server, which tools/serve_webshop.py prints'
      )
    first, end = PARTS[self.split]
    count = min(end or self.goals, self.goals) - first
    return first + selection.select(seed, count, 'shuffled')

  def level_id(self, seed: int) -> str:
    """The number of the goal; goals of several servers with one number count as equal."""
    return f'webshop {self.goal(seed)}'

  def check(self) -> None:
    """Asks the server for its first and last goal; ValueError, with one line, if it does not have them."""
    self.goal(0)
    if problem := self._site.problem(0, tries=self.retries + 1):
      raise ValueError(f'webshop: url: {problem}; allowed: a server that tools/serve_webshop.py started')
    if problem := self._site.problem(self.goals - 1, tries=1):
      raise ValueError(
        f'webshop: goals={self.goals}: goal {self.goals - 1} is not there ({problem}); allowed: the number of goals '
        'that tools/serve_webshop.py prints'
      )

  def open(self, rows: int) -> WebShopSession:
    """A session. Nothing is sent before the first reset."""
    return WebShopSession(self, self._site, rows)


@dataclasses.dataclass
class _Row:
  """An episode: its goal, the address of its page, and what the page says."""

  goal: int
  address: str
  page: Page


class WebShopSession(Session):
  """Rows that shop. The pages of all rows of a step are asked for side by side."""

  def __init__(self, env: WebShopEnvironment, site: Site, rows: int):
    """Sends nothing."""
    self._env, self._site = env, site
    self._rows: list[_Row | None] = [None] * rows

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`: the search page with the instruction."""
    goals = [self._env.goal(seed) for seed in seeds]
    addresses = [self._site.start(row, goal) for row, goal in zip(rows, goals, strict=True)]
    results: list[Any] = []
    for row, goal, address, page in zip(rows, goals, addresses, self._site.pages(addresses), strict=True):
      if not isinstance(page, Fault):
        self._rows[row] = _Row(goal, address, page)
        page = self._observation(self._rows[row])
      results.append(page)
    return results

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """See `Session`: goes where the actions lead."""
    leads = [self._lead(row, action) for row, action in zip(rows, actions, strict=True)]
    going = [i for i, lead in enumerate(leads) if isinstance(lead, str)]
    pages = dict(zip(going, self._site.pages([leads[i] for i in going]), strict=True))
    results: list[Any] = []
    for i, row in enumerate(rows):
      outcome = pages.get(i, leads[i])
      if outcome is None:
        told = f'This is not possible here.\n{self._observation(self._rows[row])}'
        results.append((told, 0.0, False, self._info(False, {'impossible': 1.0})))
      elif isinstance(outcome, Fault):
        results.append(outcome)
      else:
        results.append(self._arrive(self._rows[row], leads[i], outcome))
    return results

  def _lead(self, row: int, action: str) -> str | Fault | None:
    """The address that an action leads to; None if it is not possible on the page."""
    state, (verb, _, words) = self._rows[row], action.removesuffix(']').partition('[')
    if verb == 'search':
      return self._site.search(row, state.goal, words) if state.page.has_search else None
    target = state.page.links.get(words)
    return None if target is None else self._site.link(target)

  def _arrive(self, row: _Row, address: str, page: Page) -> tuple[str, float, bool, dict[str, Any]]:
    """The result of an action that led to a page."""
    row.address, row.page = address, page
    if page.score is None:
      return self._observation(row), 0.0, False, self._info(False, {})
    success = page.score >= 1
    reward = float(success) if self._env.reward == 'success' else min(page.score, 1.0)
    metrics = {'purchases': 1.0, 'raw_reward': page.score, **page.parts}
    return f'You bought it. Score: {floored(min(page.score, 1.0))} of 1.', reward, True, self._info(success, metrics)

  @staticmethod
  def _info(success: bool, metrics: Mapping[str, float]) -> dict[str, Any]:
    measured = {'purchases': 0.0, 'raw_reward': 0.0, 'impossible': 0.0, **metrics}
    return {'success': success, 'effective': not measured['impossible'], 'metrics': measured}

  def _observation(self, row: _Row) -> str:
    """The text of the page, the options that are chosen, and the possible actions."""
    parts = [row.page.text]
    chosen = chosen_options(row.address)
    if chosen:
      parts.append('Chosen: ' + ', '.join(f'{name}: {value}' for name, value in chosen.items()))
    if self._env.show_actions:
      search = ['search[words]'] if row.page.has_search else []
      parts.append('Possible actions: ' + ', '.join([*search, *(f'click[{name}]' for name in row.page.links)]))
    return '\n'.join(parts)

  def legal_actions(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: all clicks, and a search for the words of the instruction."""
    return [self._legal(self._rows[row].page) for row in rows]

  @staticmethod
  def _legal(page: Page) -> list[str]:
    words = search_words(page.instruction.partition(', and price lower')[0])
    search = [f'search[{words}]'] if page.has_search and words else []
    return [*search, *(f'click[{name}]' for name in page.links)]
