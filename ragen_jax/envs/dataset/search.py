"""The tool 'search': passages that match a query, from a corpus in this process or from a server.

Servers speak one of two protocols, both `POST /retrieve`:

    'ragen'      {"query": "...", "top_k": 3}
                 {"results": [{"content": "...", "score": 0.8}, ...]}
    'search_r1'  {"queries": ["...", ...], "topk": 3, "return_scores": true}
                 {"result": [[{"document": {"contents": "..."}, "score": 0.8}, ...], ...]}

A retrieval that fails is a `Fault`. That nothing matches a query is a result, which the policy reads.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.dataset.bm25 import Bm25Index, as_passage, read_corpus
from ragen_jax.envs.dataset.tools import Tool, WrongArguments, cut
from ragen_jax.envs.dataset.verifiers import INSTALL
from ragen_jax.envs.options import check_choice, check_integer, check_seconds, check_whole_number, is_number
from ragen_jax.envs.outside.timed_http import JsonRequests, in_parts
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.threads import Fault, run_calls

_log = logging.getLogger(__name__)

MOST_PASSAGES = 50
LONGEST_QUERY = 1000  # characters

_BM25, _MOCK = 'bm25:', 'mock'
_ALLOWED = f"'{_BM25}PATH.jsonl', 'http://host:port' or https, {_MOCK!r}"
_PROTOCOLS = ('ragen', 'search_r1')
_LARGEST_CORPUS = 4 << 30  # bytes; an index of it takes several times as much memory
_OF_SERVERS = ('protocol', 'retries', 'backoff_s', 'batch_size', 'workers')
# FAISS fills up a list of too few hits with the id -1 and the lowest or highest float32 as a score. Servers that take
# the id for an index return the last passage of the corpus.
_NO_SCORE = 1e30


@dataclasses.dataclass(frozen=True, eq=False)
class SearchTool(Tool):
  """Passages that match a query. docs/search.md has a table of the options."""

  name: ClassVar[str] = 'search'
  schema: ClassVar[Mapping[str, Any]] = {
    'type': 'object',
    'properties': {'query': {'type': 'string'}},
    'required': ['query'],
    'additionalProperties': False,
  }

  timeout_s: float = 30.0
  retriever: str = ''
  protocol: str = 'ragen'
  top_k: int = 3
  max_passage_chars: int = 800
  retries: int = 3
  backoff_s: float = 0.5
  batch_size: int = 64
  workers: int = 8

  def __post_init__(self):
    super().__post_init__()
    where, retriever = self.where, self.retriever
    check_choice(where, 'protocol', self.protocol, _PROTOCOLS)
    check_integer(where, 'top_k', self.top_k, 1, MOST_PASSAGES)
    check_whole_number(where, 'max_passage_chars', self.max_passage_chars, 20)
    check_whole_number(where, 'retries', self.retries, 0)
    check_seconds(where, 'backoff_s', self.backoff_s)
    for field in ('batch_size', 'workers'):
      check_whole_number(where, field, getattr(self, field), 1)
    if isinstance(retriever, str) and retriever.startswith(_BM25) and len(retriever) > len(_BM25):
      chosen = Bm25Retriever(where, retriever.removeprefix(_BM25), self.timeout_s)
    elif isinstance(retriever, str) and retriever.startswith(('http://', 'https://')):
      if '@' in retriever.split('/')[2]:
        raise ValueError(
          f'{where}: retriever has a user name or a password, which configs and logs would show; allowed: none'
        )
      chosen = HttpRetriever(self)
    elif retriever == _MOCK:
      chosen = MockRetriever()
    else:
      raise ValueError(f'{where}: retriever={one_line(retriever)}; allowed: {_ALLOWED}')
    object.__setattr__(self, '_chosen', chosen)
    others = () if isinstance(chosen, HttpRetriever) else _OF_SERVERS
    for field in dataclasses.fields(self):
      if field.name in others and getattr(self, field.name) != field.default:
        raise ValueError(
          f'{where}: {field.name}={getattr(self, field.name)!r} has no effect with retriever={one_line(retriever)}; '
          f'allowed: its default, {field.default!r}'
        )

  @property
  def help(self) -> str:
    """One line for the rules."""
    return (
      'shows the passage that fits a query best'
      if self.top_k == 1
      else (f'shows the {self.top_k} passages that fit a query best')
    )

  def checked(self, values: dict[str, Any], usage: str) -> dict[str, Any]:
    query = ' '.join(super().checked(values, usage)['query'].split())
    if len(query) > LONGEST_QUERY:
      raise WrongArguments(f'The query is longer than {LONGEST_QUERY} characters.')
    return {'query': query}

  def call(self, batch: Sequence[Mapping[str, Any]]) -> list[str | WrongArguments | Fault]:
    """See `Tool`. Equal queries are searched once."""
    queries = list(dict.fromkeys(arguments['query'] for arguments in batch))
    found = dict(zip(queries, self._chosen.search(queries, self.top_k), strict=True))
    return [self._written(query, found[query]) for query in (arguments['query'] for arguments in batch)]

  def _written(self, query: str, passages: list[str] | Fault) -> str | Fault:
    """The text of a result."""
    if isinstance(passages, Fault):
      return passages
    if not passages:
      return f'No passage matches "{query}".'
    shown = [f'[{i}] {cut(passage, self.max_passage_chars)}' for i, passage in enumerate(passages, 1)]
    return '\n'.join([f'Passages for "{query}":', *shown])

  def check(self) -> None:
    """See `Tool`: reads the corpus and makes its index, or sends the server a query."""
    self._chosen.check()


class Retriever(abc.ABC):
  """What finds passages."""

  @abc.abstractmethod
  def search(self, queries: Sequence[str], top_k: int) -> list[list[str] | Fault]:
    """For each query at most `top_k` passages, the best first, each with its title in the first line."""

  def check(self) -> None:
    """Raises ValueError with one line if a file, a package or a server is missing."""
    return


class MockRetriever(Retriever):
  """Makes up passages that contain the query, for rehearsals without a corpus."""

  def search(self, queries: Sequence[str], top_k: int) -> list[list[str] | Fault]:
    return [[f'Made-up passage {i}\nThis text stands for a passage about {q}.' for i in range(top_k)] for q in queries]


# -- BM25 in this process ----------------------------------------------------------------------------------------------


class Bm25Retriever(Retriever):
  """Ranks the passages of a file by BM25. The file is read and indexed once in a process, for all environments."""

  def __init__(self, where: str, path: str, timeout_s: float):
    """Reads nothing yet.

    Args:
      where: section of the config, for errors.
      path: file of the corpus.
      timeout_s: time limit of a query, in seconds.
    """
    self._where, self._path, self._timeout_s = where, path, timeout_s

  @functools.cached_property
  def _index(self) -> Bm25Index:
    path = pathlib.Path(self._path)
    option = f"{self._where}: retriever='{_BM25}{self._path}'"
    try:
      stat = path.stat()
      return _read_index(path.resolve(), stat.st_size, stat.st_mtime_ns)
    except OSError as e:
      raise ValueError(f'{option}: cannot be read ({e.strerror}); docs/search.md explains how to make a corpus') from e
    except UnicodeDecodeError as e:
      raise ValueError(f'{option}: is not UTF-8') from e
    except ImportError as e:
      raise ValueError(f'{option}: needs a package that is not installed: {INSTALL}') from e
    except ValueError as e:
      raise ValueError(f'{option}: {e}') from e

  def check(self) -> None:
    self._index  # noqa: B018, it is made here

  def search(self, queries: Sequence[str], top_k: int) -> list[list[str] | Fault]:
    """See `Retriever`. Passages with equal scores are in the order of the file."""
    index = self._index  # making it has no time limit
    calls = [functools.partial(index.search, query, top_k) for query in queries]
    results = run_calls(calls, what='search', workers=1, timeout_s=self._timeout_s, owner=self)
    return [result if fault is None else fault for result, fault in results]


@functools.lru_cache(maxsize=8)
def _read_index(path: pathlib.Path, size: int, modified_ns: int) -> Bm25Index:
  """The index of a corpus; a file that has changed is read again."""
  del modified_ns
  if size > _LARGEST_CORPUS:
    raise ValueError(f'is larger than {_LARGEST_CORPUS >> 30} GiB; a server can search larger corpora')
  passages = read_corpus(path)
  _log.info('search: making an index of the %d passages of %s', len(passages), path)
  return Bm25Index(passages)


# -- a server ----------------------------------------------------------------------------------------------------------


class HttpRetriever(Retriever):
  """Asks a server. Several requests of a batch are sent at a time, see `in_parts`."""

  def __init__(self, options: SearchTool):
    """Sends no request.

    Args:
      options: address, protocol and limits.
    """
    self._options = options
    self._url = options.retriever.rstrip('/').removesuffix('/retrieve') + '/retrieve'
    self._is_batched = options.protocol == 'search_r1'
    self._requests = JsonRequests(options.timeout_s, options.retries + 1, options.backoff_s)

  def check(self) -> None:
    """See `Retriever`: sends one query."""
    (result,) = self.search(['health check'], 1)
    if isinstance(result, Fault):
      o = self._options
      raise ValueError(
        f'{o.where}: retriever={o.retriever!r}: {result}; allowed: the address of a server with protocol={o.protocol!r}'
      )

  def search(self, queries: Sequence[str], top_k: int) -> list[list[str] | Fault]:
    o = self._options
    limits = {'workers': o.workers, 'timeout_s': self._requests.longest_s, 'owner': self}
    ask = functools.partial(self._ask, top_k=top_k)
    return in_parts(queries, o.batch_size if self._is_batched else 1, ask, what='search', **limits)

  def _ask(self, queries: Sequence[str], top_k: int) -> list[list[str] | Fault]:
    """The passages for the queries of one request; raises NoAnswer."""
    if self._is_batched:
      body: dict[str, Any] = {'queries': list(queries), 'topk': top_k, 'return_scores': True}
    else:
      body = {'query': queries[0], 'top_k': top_k}
    lists = self._requests.post(self._url, body, lambda answer: self._lists(json.loads(answer), len(queries)))
    return [_read_hits(hits, top_k) for hits in lists]

  def _lists(self, answer: Any, count: int) -> list[Any]:
    """The list of hits of each query; raises ValueError if the answer is not of the protocol."""
    field = 'result' if self._is_batched else 'results'
    if not isinstance(answer, dict) or not isinstance(answer.get(field), list):
      raise ValueError(f'the answer has no list {field!r}: {short(answer)}')
    lists = answer[field] if self._is_batched else [answer[field]]
    if len(lists) != count:
      raise ValueError(f'{count} queries were sent, {len(lists)} results came back')
    return lists


def _read_hits(hits: Any, top_k: int) -> list[str] | Fault:
  """The passages of the answer to one query, in either protocol; a fault if anything in it is not as it must be."""
  if not isinstance(hits, list):
    return Fault('search answered no list of passages', short(hits))
  passages = []
  for hit in hits:
    document = hit.get('document', hit) if isinstance(hit, dict) else None
    contents = document.get('contents', document.get('content')) if isinstance(document, dict) else None
    if not isinstance(contents, str):
      return Fault('search answered a passage without text', short(hit))
    score = hit.get('score')
    score = 0.0 if score is None else score
    if not is_number(score) or score != score:
      return Fault('search answered a score that is no number', short(score))
    title = document.get('title', '')
    if abs(score) < _NO_SCORE and document.get('id') not in (-1, '-1') and contents.strip():
      passages.append(as_passage(contents, title if isinstance(title, str) else ''))
  return passages[:top_k]
