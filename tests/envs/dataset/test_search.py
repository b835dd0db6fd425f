"""The tool 'search': corpora in this process, servers of both protocols, and everything that a server can do wrong."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import pathlib
import socket
import threading

import pytest

from ragen_jax.envs.dataset.search import LONGEST_QUERY, SearchTool
from ragen_jax.envs.dataset.tool_use import make_toolbox
from ragen_jax.envs.dataset.tools import WrongArguments
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line
from tests.support.serving import until
from tests.support.stopped_clock import stop_clock

needs_bm25s = pytest.mark.skipif(
  importlib.util.find_spec('bm25s') is None, reason='bm25s is not installed: requirements-data.txt'
)
PROTOCOLS = ('ragen', 'search_r1')
CORPUS = {
  'Turin': 'Turin is a city on the river Po.',
  'Po': 'The Po is a river of 652 km.',
  'Ada Lovelace': 'Ada wrote about the Analytical Engine.',
}


class Server(http.server.ThreadingHTTPServer):
  """Both protocols over a corpus: hits are the passages with the query in them. `trouble` may answer in its place."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.requests, self.lock = [], threading.Lock()
    self.trouble = lambda body, number: None
    self.change = lambda answer: answer
    self.url = f'http://127.0.0.1:{self.server_address[1]}'

  def handle_error(self, request, client_address):
    """Broken connections are what some tests are about."""

  def answer(self, body):
    if 'queries' in body:
      assert set(body) == {'queries', 'topk', 'return_scores'} and body['return_scores'] is True
      return {'result': [self.hits(query, body['topk'], as_r1) for query in body['queries']]}
    assert set(body) == {'query', 'top_k'}
    hits = self.hits(body['query'], body['top_k'], as_ragen)
    return {'query': body['query'], 'method': 'dense', 'results': hits, 'num_results': len(hits)}

  def hits(self, query, most, form):
    return [form(title, text) for title, text in CORPUS.items() if query in text][:most]


def as_r1(title, text, score=0.5):
  return {'document': {'id': '3', 'contents': f'"{title}"\n{text}'}, 'score': score}


def as_ragen(title, text, score=0.5):
  return {'id': 'doc_1', 'content': f'"{title}"\n{text}', 'score': score}


FORMS = {'ragen': as_ragen, 'search_r1': as_r1}


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *arguments):
    """Quiet."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    server = self.server
    with server.lock:
      server.requests.append(body)
      number = len(server.requests)
    if self.path != '/retrieve' or self.headers['Content-Type'] != 'application/json':
      return self.reply(404, b'')
    trouble = server.trouble(body, number)
    return self.reply(*trouble) if trouble else self.reply(200, json.dumps(server.change(server.answer(body))).encode())

  def reply(self, status, data, length=None):
    if status == 0:  # hangs up
      self.close_connection = True
      return
    self.send_response(status)
    self.send_header('Content-Length', str(len(data) if length is None else length))
    self.end_headers()
    with contextlib.suppress(OSError):
      self.wfile.write(data)


@pytest.fixture
def server():
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def connect(server, protocol='ragen', **options):
  options = {'timeout_s': 60.0, 'backoff_s': 0.01} | options
  return SearchTool(retriever=server.url, protocol=protocol, **options)


def search(tool, *queries):
  return tool.call([tool.read(query) for query in queries])


TURIN, PO = (f'{title}\n{CORPUS[title]}' for title in ('Turin', 'Po'))


# -- results -----------------------------------------------------------------------------------------------------------


def by_hand(query, passages):
  """The text of a result."""
  if not passages:
    return f'No passage matches "{query}".'
  return f'Passages for "{query}":' + ''.join(f'\n[{i + 1}] {passage}' for i, passage in enumerate(passages))


@pytest.mark.parametrize(
  ('protocol', 'options', 'requests'),
  [('ragen', {}, 3), ('search_r1', {}, 1), ('search_r1', {'batch_size': 2}, 2), ('search_r1', {'batch_size': 1}, 3)],
)
def test_servers_of_both_protocols_are_searched(server, protocol, options, requests):
  tool = connect(server, protocol, **options)
  tool.check()
  server.requests.clear()
  results = search(tool, 'river', 'zebra', 'city', ' city', 'river')
  assert results == [
    by_hand('river', [TURIN, PO]), by_hand('zebra', []), by_hand('city', [TURIN]), by_hand('city', [TURIN]),
    by_hand('river', [TURIN, PO]),
  ]  # fmt: skip
  assert len(server.requests) == requests  # equal queries are sent once
  assert {body.get('top_k', body.get('topk')) for body in server.requests} == {3}
  assert search(connect(server, protocol, top_k=1), 'river') == [by_hand('river', [TURIN])]


@pytest.mark.parametrize('end', ['', '/', '/retrieve', '/retrieve/'])
def test_the_address_may_name_the_path(server, end):
  tool = SearchTool(retriever=server.url + end)
  assert search(tool, 'city') == [by_hand('city', [TURIN])]


@needs_bm25s
def test_a_corpus_is_searched_in_the_process(tmp_path):
  path = tmp_path / 'corpus.jsonl'
  path.write_text('\n'.join(json.dumps({'title': k, 'contents': v}) for k, v in CORPUS.items()), encoding='utf-8')
  tool = SearchTool(retriever=f'bm25:{path}', top_k=2)
  tool.check()
  assert search(tool, 'the Analytical ENGINE?', 'zebra', '652') == [
    by_hand('the Analytical ENGINE?', ['Ada Lovelace\nAda wrote about the Analytical Engine.', TURIN]),
    by_hand('zebra', []),
    by_hand('652', [PO]),
  ]


@needs_bm25s
def test_a_corpus_is_read_once_and_again_if_it_changes(tmp_path, monkeypatch):
  path, opened, original = tmp_path / 'corpus.jsonl', [], pathlib.Path.open
  monkeypatch.setattr(pathlib.Path, 'open', lambda self, *a, **k: opened.append(self) or original(self, *a, **k))
  path.write_text('{"contents": "a cat"}', encoding='utf-8')
  tools = [SearchTool(retriever=f'bm25:{path}', top_k=k) for k in (1, 2)]
  opened.clear()
  for tool in tools:
    tool.check()
    assert search(tool, 'cat') == [by_hand('cat', ['a cat'])]
  assert len(opened) == 1
  path.write_text('{"contents": "a black cat"}', encoding='utf-8')
  assert search(tools[0], 'cat') == [by_hand('cat', ['a cat'])]  # a run keeps what it began with
  assert search(SearchTool(retriever=f'bm25:{path}'), 'cat') == [by_hand('cat', ['a black cat'])]


def test_passages_are_cut_one_by_one_and_all_together(server):
  server.answer = lambda body: {'results': [as_ragen('T' * 10, 'x' * 500)] * 5}
  (result,) = search(connect(server, max_passage_chars=100, top_k=4), 'q')
  header, *passages = result.split('\n[')
  assert header == 'Passages for "q":' and len(passages) == 4
  assert {len(p) for p in passages} == {100 + len('1] ')} and all(p.endswith('xxx [cut]') for p in passages)
  use = make_toolbox(('search',), {'search': {'retriever': server.url, 'max_chars': 250, 'budget': 2}}).open(1)
  (told,) = use.step([0], ['search[q]'])
  shown, left = told.text.rsplit('\n', 1)
  assert len(shown) == 250 and shown.endswith('xxx [cut]') and left == 'Calls of search left: 1.'


def test_queries_are_one_line_of_bounded_length():
  tool = SearchTool(retriever='mock')
  assert tool.read(' a\n\tb  c ') == {'query': 'a b c'}
  for argument in ('', ' \n '):
    with pytest.raises(WrongArguments, match=r'^The query is empty.$'):
      tool.read(argument)
  assert tool.read('x' * LONGEST_QUERY) == {'query': 'x' * LONGEST_QUERY}
  with pytest.raises(WrongArguments, match=r'^The query is longer than 1000 characters'):
    tool.read('x' * (LONGEST_QUERY + 1))


def test_the_help_names_the_number_of_passages():
  assert SearchTool(retriever='mock').help == 'shows the 3 passages that fit a query best'
  assert SearchTool(retriever='mock', top_k=1).help == 'shows the passage that fits a query best'
  assert SearchTool(retriever='mock').usage == 'search[query]'


def test_made_up_passages_need_nothing():
  first, other = search(SearchTool(retriever='mock', top_k=2), 'cats', 'dogs')
  assert first.count('about cats') == 2 and other == first.replace('cats', 'dogs')


# -- what can go wrong -------------------------------------------------------------------------------------------------


TROUBLES = {
  'busy': (lambda: (503, b'busy'), 'status 503 Service Unavailable'),
  'too many requests': (lambda: (429, b''), 'status 429 Too Many Requests'),
  'an error of its own': (lambda: (500, b'oops'), 'status 500 Internal Server Error'),
  'hangs up': (lambda: (0, b''), 'RemoteDisconnected: '),
  'no JSON': (lambda: (200, b'<html>'), 'JSONDecodeError: '),
  'cut JSON': (lambda: (200, b'{"results": [{"content": "a'), 'JSONDecodeError: '),
  'cut body': (lambda: (200, b'{"results"', 4000), ''),
  'deep JSON': (lambda: (200, b'[' * 200_000), 'RecursionError: '),
  'no UTF-8': (lambda: (200, b'{"results": "\xff"}'), 'UnicodeDecodeError: '),
  'no object': (lambda: (200, b'[1]'), 'ValueError: the answer has no list '),
  'an error': (lambda: (200, b'{"error": "no index"}'), "the answer has no list 'resul"),
  'no list': (lambda: (200, b'{"results": 3, "result": {"0": []}}'), 'ValueError: the answer has no list '),
}


@pytest.mark.parametrize('protocol', PROTOCOLS)
@pytest.mark.parametrize('name', TROUBLES)
def test_a_request_is_tried_again_and_then_is_a_fault(server, protocol, name):
  trouble, reason = TROUBLES[name]
  server.trouble = lambda body, number: trouble() if number == 1 else None
  assert search(connect(server, protocol, retries=1), 'city') == [by_hand('city', [TURIN])]
  assert len(server.requests) == 2
  server.trouble = lambda body, number: trouble()
  (fault,) = search(connect(server, protocol, retries=1), 'city')
  assert isinstance(fault, Fault) and fault.kind == 'search got no answer' and len(server.requests) == 4
  assert fault.detail.startswith(f'{server.url}/retrieve: ') and reason in fault.detail
  assert fault.detail.endswith(', 2 tries')


@pytest.mark.parametrize('results', [[], [[]], [[], [], []]])
def test_a_wrong_number_of_results_is_a_fault(server, results):
  server.answer = lambda body: {'result': results}
  faults = search(connect(server, 'search_r1', retries=0), 'river', 'city')
  assert len(set(faults)) == 1
  assert faults[0].detail.endswith(f'ValueError: 2 queries were sent, {len(results)} results came back, 1 try')


def test_what_is_refused_is_not_tried_again(server):
  server.trouble = lambda body, number: (404, b'')
  (fault,) = search(connect(server), 'city')
  assert (
    str(fault) == f'search got no answer: {server.url}/retrieve: status 404 Not Found' and len(server.requests) == 1
  )


def test_an_answer_that_is_too_large_is_not_read_to_its_end(server, monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.outside.timed_http._LARGEST_ANSWER_MIB', 1)
  server.trouble = lambda body, number: (200, b' ' * (1 << 21))
  (fault,) = search(connect(server), 'city')
  assert str(fault).endswith('/retrieve: the answer is larger than 1 MiB') and len(server.requests) == 1


def test_the_waits_between_tries_double(server, monkeypatch):
  waits = []
  stop_clock(monkeypatch, 'ragen_jax.envs.outside.timed_http', sleep=waits.append)
  server.trouble = lambda body, number: (503, b'')
  search(connect(server, retries=8, backoff_s=0.5), 'city')
  assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_server_that_is_too_slow_is_cut_off(server, monkeypatch):
  clock = stop_clock(monkeypatch, 'ragen_jax.envs.outside.timed_http')

  def late(body, number):
    clock.now += 61.0
    return 200, b'{"results": ', 4000  # the rest never comes

  server.trouble = late
  (fault,) = search(connect(server, retries=0, timeout_s=60.0), 'city')
  assert fault.detail == f'{server.url}/retrieve: no whole answer in 60 s, 1 try'
  del server.requests[:]
  faults = search(connect(server, retries=0, timeout_s=60.0, workers=1), 'city', 'river')  # the second is not sent
  assert len(faults) == 2 and len(server.requests) == 1


def test_a_dead_server_costs_its_tries_once(server):
  server.trouble = lambda body, number: (0, b'')
  faults = search(connect(server, retries=1, workers=1), *'abcde')
  assert len(server.requests) == 2 and len(set(faults)) == 1
  with socket.socket() as unused:
    unused.bind(('127.0.0.1', 0))
    url = f'http://127.0.0.1:{unused.getsockname()[1]}'
    faults = search(SearchTool(retriever=url, retries=0, workers=1), 'a', 'b')
  assert len(set(faults)) == 1 and 'refused' in faults[0].detail and faults[0].detail.endswith(', 1 try')


def test_one_query_that_a_server_fails_at_is_its_own_and_three_are_all(server):
  server.trouble = lambda body, number: (500, b'') if body['query'].startswith('bad') else None
  tool = connect(server, retries=0, workers=1)
  first, bad, worse, last = search(tool, 'city', 'bad', 'bad too', 'river')
  assert (first, last) == (by_hand('city', [TURIN]), by_hand('river', [TURIN, PO]))
  assert isinstance(bad, Fault) and isinstance(worse, Fault) and len(server.requests) == 4
  results = search(tool, 'bad 1', 'city', 'bad 2', 'bad 3', 'river', 'bad 4')
  assert [isinstance(r, Fault) for r in results] == [True, False, True, True, True, True] and len(server.requests) == 8
  assert search(tool, 'city') == [by_hand('city', [TURIN])]  # the next batch begins anew


def test_requests_are_sent_at_a_time(server):
  server.trouble = lambda body, number: until(lambda: len(server.requests) >= 2)
  results = search(connect(server, workers=2), 'city', 'river')
  assert results == [by_hand('city', [TURIN]), by_hand('river', [TURIN, PO])]


@pytest.mark.parametrize('protocol', PROTOCOLS)
def test_a_score_may_be_null(server, protocol):
  server.hits = lambda *_: [FORMS[protocol]('Turin', 'A city.', None)]
  assert search(connect(server, protocol), 'city') == [by_hand('city', ['Turin\nA city.'])]


@pytest.mark.parametrize('protocol', PROTOCOLS)
@pytest.mark.parametrize(
  ('hit', 'message'),
  [
    (7, 'search answered a passage without text: 7'),
    (None, 'search answered a passage without text: None'),
    ({'document': 'text', 'score': 1.0}, 'search answered a passage without text: '),
    ({'document': {'contents': 3}, 'score': 1.0}, 'search answered a passage without text: '),
    ({'score': 1.0}, 'search answered a passage without text: '),
    ({'content': 'a', 'score': '1'}, "search answered a score that is no number: '1'"),
    ({'content': 'a', 'score': float('nan')}, 'search answered a score that is no number: nan'),
  ],
)
def test_a_hit_that_is_none_is_a_fault_of_its_query(server, protocol, hit, message):
  good = FORMS[protocol]('Turin', 'A city.')

  def hits(query, most, form):
    return [good, hit] if query == 'bad' else [good]

  server.hits = hits
  bad, fine = search(connect(server, protocol), 'bad', 'fine')
  assert str(bad).startswith(message) and fine == by_hand('fine', ['Turin\nA city.'])


def test_a_list_of_hits_that_is_none_is_a_fault_of_its_query(server):
  server.answer = lambda body: {'result': [None, []]}
  bad, fine = search(connect(server, 'search_r1'), 'bad', 'fine')
  assert str(bad) == 'search answered no list of passages: None' and fine == by_hand('fine', [])


@pytest.mark.parametrize('protocol', PROTOCOLS)
def test_what_faiss_fills_up_with_is_no_hit(server, protocol):
  form, lowest = FORMS[protocol], -3.4028234663852886e38
  fills = [form('Last', 'The last passage.', score) for score in (lowest, -lowest, float('-inf'))]
  padding = {'id': -1, 'contents': 'The last passage.'}
  fills += [{'document': padding, 'score': 0.0}, {'document': padding | {'id': '-1'}, 'score': 0.0}]
  server.hits = lambda query, most, form: [*fills, form('Turin', 'A city.', 0.9)] if query == 'city' else fills
  assert search(connect(server, protocol, top_k=1), 'city', 'zebra') == [
    by_hand('city', ['Turin\nA city.']),
    by_hand('zebra', []),
  ]


def test_search_r1_may_leave_out_scores_and_too_many_hits_are_dropped(server):
  documents = [{'id': str(i), 'contents': f'"T{i}"\ntext'} for i in range(4)] + [{'title': 'T', 'contents': ' '}]
  server.answer = lambda body: {'result': [documents]}
  assert search(connect(server, 'search_r1', top_k=2), 'q') == [by_hand('q', ['T0\ntext', 'T1\ntext'])]
  server.answer = lambda body: {
    'result': [[{'title': 'T', 'text': 'x', 'contents': 'y'}, {'title': 3, 'contents': 'z'}]]
  }
  assert search(connect(server, 'search_r1'), 'q') == [by_hand('q', ['T\ny', 'z'])]


# -- the check before a run --------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_one_line(server):
  server.trouble = lambda body, number: (404, b'')
  for protocol in PROTOCOLS:
    message = (
      rf"^tool_options.search: retriever='{server.url}': search got no answer: {server.url}/retrieve: status 404 "
    )
    with raises_one_line(message + rf"Not Found; allowed: the address of a server with protocol='{protocol}'$"):
      connect(server, protocol).check()


def test_a_server_of_the_other_protocol_is_noticed(server):
  server.answer = lambda body: {'result': []}
  with raises_one_line("the answer has no list 'results': .*; allowed: .* with protocol='ragen'$"):
    connect(server, 'ragen', retries=0).check()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, r'cannot be read \(No such file or directory\); docs/search.md explains how to make a corpus'),
    ('{"contents": "a"}\n{', r'line 2 is no JSON \(.*\); allowed: '),
    (b'\xff', 'is not UTF-8'),
    ('', 'has no passage; allowed: '),
    ('{"contents": "..."}', 'has no word in any passage'),
  ],
)
def test_a_corpus_that_cannot_be_used_is_one_line(tmp_path, text, message):
  if text == '{"contents": "..."}':
    pytest.importorskip('bm25s', reason='bm25s is not installed: requirements-data.txt')
  path = tmp_path / 'corpus.jsonl'
  if text is not None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
  tool = SearchTool(retriever=f'bm25:{path}')
  with raises_one_line(rf"^tool_options.search: retriever='bm25:{path}': {message}"):
    tool.check()
  # Without a check, the same is a fault of each call.
  use = make_toolbox(('search',), {'search': {'retriever': f'bm25:{path}'}}).open(1)
  (fault,) = use.step([0], ['search[a]'])
  assert isinstance(fault, Fault) and fault.kind == 'search raised ValueError'


def test_a_corpus_that_is_too_large_is_refused_before_it_is_read(tmp_path):
  path = tmp_path / 'corpus.jsonl'
  with path.open('wb') as file:
    file.truncate((4 << 30) + 1)  # without contents: it takes no room on the disk
  with raises_one_line('is larger than 4 GiB; a server can search larger corpora$'):
    SearchTool(retriever=f'bm25:{path}').check()


def test_without_the_package_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'bm25s', None)
  path = tmp_path / 'corpus.jsonl'
  path.write_text('{"contents": "another cat"}', encoding='utf-8')
  with raises_one_line('needs a package that is not installed: pip install -r requirements-data.txt$'):
    SearchTool(retriever=f'bm25:{path}').check()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({}, "retriever=''; allowed: 'bm25:PATH.jsonl', 'http://host:port' or https, 'mock'"),
    ({'retriever': 'bm25:'}, "retriever='bm25:'; allowed: "),
    ({'retriever': 'corpus.jsonl'}, "retriever='corpus.jsonl'; allowed: "),
    ({'retriever': 7}, 'retriever=7; allowed: '),
    ({'retriever': 'http://me:word@host'}, 'retriever has a user name or a password, .*; allowed: none'),
    ({'protocol': 'r1'}, "protocol='r1'; allowed: ragen, search_r1"),
    ({'top_k': 0}, 'top_k=0; allowed: integers from 1 to 50'),
    ({'top_k': 51}, 'top_k=51; allowed: integers from 1 to 50'),
    ({'max_passage_chars': 19}, 'max_passage_chars=19; allowed: whole numbers from 20'),
    ({'retries': -1}, 'retries=-1; allowed: whole numbers from 0'),
    ({'backoff_s': 0}, 'backoff_s=0; allowed: seconds, above 0'),
    ({'batch_size': 0}, 'batch_size=0; allowed: whole numbers from 1'),
    ({'workers': 0}, 'workers=0; allowed: whole numbers from 1'),
    ({'timeout_s': -1.0}, 'timeout_s=-1.0; allowed: seconds, above 0'),
    (
      {'protocol': 'search_r1'},
      "protocol='search_r1' has no effect with retriever='mock'; allowed: its default, 'ragen'",
    ),
    (
      {'retriever': 'bm25:x.jsonl', 'workers': 9},
      r"workers=9 has no effect with retriever='bm25:x\.jsonl'; allowed: its default, 8",
    ),
  ],
)
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(f'^tool_options.search: {message}'):
    SearchTool(**({'retriever': 'mock'} | options if options and 'retriever' not in options else options))
