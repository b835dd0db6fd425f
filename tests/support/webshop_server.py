"""A small shop with the addresses and the elements of WebShop's site, which the client reads.

Like the site, it keeps the goal of a session only: everything else of an episode is in the addresses. And as there, an
`h4` may be closed by `h5`, a list of products stands in a comment, and the last page hides what was wanted.
"""

from __future__ import annotations

import ast
import contextlib
import html
import http.server
import threading
import urllib.parse
from collections.abc import Callable, Iterator

PRODUCTS = {
  'B01': ('Red shirt', 12.5, {'color': ['red', 'blue'], 'size': ['small', 'large'], 'trim': ['red', 'none']}),
  'B02': ('Green shirt of wool', 30.0, {'fit': ['a | b', 'features']}),
  'B03': ('Blue hat', 5.0, {}),
  **{f'C{i:02}': (f'Plain shirt {i}', 9.0 + i, {}) for i in range(10)},
}
# (instruction, product, options, highest price)
GOALS = [
  ('Find me a red shirt, with size: large, and price lower than 20.00 dollars', 'B01', {'size': 'large'}, 20.0),
  ('i want a hat', 'B03', {}, 10.0),
]


def _quoted(*parts: object) -> str:
  return html.escape('/' + '/'.join(urllib.parse.quote(str(part), safe='') for part in parts))


def _button(text: str, *address: object) -> str:
  return (
    f'<form method="post" action="{_quoted(*address)}"><button type="submit" class="btn btn-primary">'
    f'{html.escape(text)}</button></form>'
  )


def _page(instruction: str, body: str) -> str:
  return (
    '<!DOCTYPE html><html><head><title>Shop</title><style>p {}</style></head><body>'
    '<script>let x = "<p>no</p>";</script>'
    f'<div id="instruction-text"><h4>Instruction: <br>{html.escape(instruction)}</h4><h4>Now</h4></div>{body}'
    '</body></html>'
  )


def start(session: str, instruction: str) -> str:
  return _page(instruction, (
    f'<form role="form" method="post" action="{_quoted(session)}"><input id="search_input" type="text" required/>'
    '<button class="btn" type="submit"><i></i>Search</button></form><iframe>no frames</iframe>'
  ))  # fmt: skip


def results(session: str, instruction: str, words: str, page: int) -> str:
  found = [asin for asin, (title, _, _) in PRODUCTS.items() if set(words.split()) & set(title.lower().split())]
  shown = found[10 * (page - 1) : 10 * page]
  items = ''.join(
    f'<h4 class="product-asin"><a class="product-link" href="{_quoted("item_page", session, asin, [words], page, {})}">'
    f'{asin}</a></h4><h4>{PRODUCTS[asin][0]}</h5><h5>${PRODUCTS[asin][1]}</h6>' for asin in shown
  )  # fmt: skip
  buttons = _button('Back to Search', session)
  if page > 1:
    buttons += _button('< Prev', 'search_results', session, [words], page - 1)
  if 10 * page < len(found):
    buttons += _button('Next >', 'search_results', session, [words], page + 1)
  return _page(instruction, f'<p>Page {page} of {len(found)} results</p>{buttons}<!-- <h4>old {items}</h4> -->{items}')


def item(session: str, instruction: str, asin: str, words: str, page: str, options: dict[str, str]) -> str:
  title, price, known = PRODUCTS[asin]
  radios = ''.join(
    f'<input type="radio" name="{name}" value="{value}" data-url="'
    f'{_quoted("item_page", session, asin, words, page, options | {name: value})}"><label>{value}</label>'
    for name, values in known.items()
    for value in values
  )
  buttons = _button('Back to Search', session) + _button('< Back to Results', 'search_results', session, words, page)
  for name in ('Description', 'Features'):
    buttons += _button(name, 'item_sub_page', session, asin, words, page, name, options)
  buttons += _button('Buy Now', 'done', session, asin, options)
  return _page(instruction, f'{buttons}{radios}<h2>{title}</h2><h4>Price: ${price}</h4>')


def sub_page(session: str, instruction: str, asin: str, words: str, page: str, name: str, options: str) -> str:
  back = _button('< Prev', 'item_page', session, asin, words, page, options)
  return _page(instruction, f'{back}<p>{name} of {PRODUCTS[asin][0]}</p>')


def done(goal: int, asin: str, options: dict[str, str]) -> str:
  _, wanted, wanted_options, most = GOALS[goal]
  matched = sum(options.get(name) == value for name, value in wanted_options.items())
  fits = PRODUCTS[asin][1] <= most
  score = float(asin == wanted) * (1 + matched + fits) / (2 + len(wanted_options))
  parts = {'r_type': float(asin == wanted), 'r_att': 1.0, 'r_price': fits, 'title_score': 0.5}
  return (
    f'<body><h1>Thank you</h1><div style="display:none"><h4 id="asin">asin<pre>{asin}</pre></p>'
    f'<h4 id="goal">goal<pre>{wanted}</pre></h4></div><h3 id="reward">Your score<pre>{score}</pre></h3>'
    f'<h4 hidden>Details <div id="reward_info"><pre>{html.escape(str(parts))}</pre></div></h4></body>'
  )


class Server(http.server.ThreadingHTTPServer):
  """Attributes: the paths so far; `trouble`, asked with the path and number of each, may answer (status, text)."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.paths: list[str] = []
    self.sessions: dict[str, int] = {}
    self.lock = threading.Lock()
    self.trouble: Callable[[str, int], tuple[int, str] | None] = lambda path, number: None
    self.url = f'http://127.0.0.1:{self.server_address[1]}'

  def handle_error(self, request, client_address):
    """Broken connections are what some tests are about."""

  def answer(self, path: str) -> str:
    parts = [urllib.parse.unquote(part) for part in path.split('/')[1:]]
    if len(parts) == 1:
      goal = int(parts[0].split('_')[-1])
      instruction = GOALS[goal][0]  # an index that is not there is the server's error
      self.sessions[parts[0]] = goal
      return start(parts[0], instruction)
    kind, session, *rest = parts
    instruction = GOALS[self.sessions[session]][0]
    if kind == 'search_results':
      words = ' '.join(ast.literal_eval(rest[0])) if rest[0].startswith('[') else rest[0]
      return results(session, instruction, words, int(rest[1]))
    if kind == 'item_page':
      return item(session, instruction, *rest[:3], ast.literal_eval(rest[3]))
    if kind == 'item_sub_page':
      return sub_page(session, instruction, *rest)
    assert kind == 'done'
    return done(self.sessions[session], rest[0], ast.literal_eval(rest[1]))


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *arguments):
    """Quiet."""

  def do_GET(self):
    server = self.server
    with server.lock:
      server.paths.append(self.path)
      number = len(server.paths)
      trouble = server.trouble(self.path, number)
      try:
        status, text = trouble or (200, server.answer(self.path))
      except (LookupError, ValueError, TypeError, AssertionError, SyntaxError):
        status, text = 500, 'Internal Server Error'
    data = text.encode()
    self.send_response(status)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    with contextlib.suppress(OSError):
      self.wfile.write(data)


@contextlib.contextmanager
def serve() -> Iterator[Server]:
  """A server on loopback."""
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    try:
      yield server
    finally:
      server.shutdown()
      thread.join()
