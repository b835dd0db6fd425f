"""Buckets on this machine: in memory, servers of S3 and of Google Cloud Storage, and buckets that are away."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ragen_jax.runs import store_retries
from ragen_jax.runs.stores import Store, StoreError


def away(cause: Exception | None = None) -> StoreError:
  """The error of a request to a bucket that is away; or of one with another cause."""
  error = StoreError('the network is down')
  error.__cause__ = cause or ConnectionError('the network is down')
  return error


class Pauses:
  """The clock of `store_retries`, on which every pause takes no time.

  Attributes:
    now: the time, in seconds.
    taken: the pauses, in seconds.
    during: called in each pause.
  """

  def __init__(self):
    self.now, self.taken = 1000.0, []
    self.during: Callable[[], None] = lambda: None

  @classmethod
  def put(cls, monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Puts a clock in the place of the `time` of `store_retries`."""
    pauses = cls()
    monkeypatch.setattr(store_retries, 'time', pauses)
    return pauses

  def monotonic(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    self.now += seconds
    self.taken.append(seconds)
    self.during()


@contextlib.contextmanager
def memory_store(url: str = 's3://bucket/run') -> Iterator[Store]:
  """Context manager: an empty store that is in this process only."""
  MemoryFileSystem.store.clear()
  MemoryFileSystem.pseudo_dirs[:] = ['']
  yield Store(url, MemoryFileSystem())
  MemoryFileSystem.store.clear()


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
  """Context manager: a server of S3 with the empty bucket 'bucket'; gives the environment of its clients."""
  server = pytest.importorskip('moto.server', reason="needs pip install 'moto[s3]' flask flask-cors")
  pytest.importorskip('s3fs', reason='needs pip install -r requirements-stores.txt')
  import boto3

  server = server.ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
  server.start()
  host, port = server.get_host_and_port()
  environment = {
    'AWS_ENDPOINT_URL': f'http://{host}:{port}',
    'AWS_ACCESS_KEY_ID': 'key',
    'AWS_SECRET_ACCESS_KEY': 'secret',
    'AWS_DEFAULT_REGION': 'us-east-1',
  }
  client = boto3.client(
    's3', endpoint_url=environment['AWS_ENDPOINT_URL'], region_name='us-east-1', aws_access_key_id='key',
    aws_secret_access_key='secret',
  )  # fmt: skip
  client.create_bucket(Bucket='bucket')
  with _environment(environment):
    yield environment
  server.stop()


@contextlib.contextmanager
def gs_server() -> Iterator[dict[str, str]]:
  """Context manager: a server of Google Cloud Storage with the empty bucket 'bucket'; as `s3_server`."""
  # Read when gcsfs is imported: the emulator cannot tell the kind of a bucket.
  os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
  emulator = pytest.importorskip('gcp_storage_emulator.server', reason='needs pip install gcp-storage-emulator')
  pytest.importorskip('gcsfs', reason='needs pip install -r requirements-stores.txt')
  _tell_generations(emulator)
  server = emulator.create_server('127.0.0.1', 0, in_memory=True, default_bucket='bucket')
  server.start()
  url = f'http://127.0.0.1:{server._api._httpd.socket.getsockname()[1]}'
  environment = {
    'STORAGE_EMULATOR_HOST': url,  # gcsfs
    'TENSORSTORE_GCS_HTTP_URL': url,  # Orbax
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token',
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
  }
  with _environment(environment):
    yield environment
  server.stop()


def _tell_generations(emulator: Any) -> None:
  """Adds the header of an object's generation, which the emulator leaves out, to downloads.

  TensorStore writes on condition of the generation that it has read, and fails where it has read none.
  """
  from gcp_storage_emulator.exceptions import NotFound
  from gcp_storage_emulator.handlers import objects

  plain = objects.download
  if hasattr(plain, '__wrapped__'):  # done already
    return

  @functools.wraps(plain)
  def download(request, response, storage, *args, **kwargs):
    plain(request, response, storage, *args, **kwargs)
    with contextlib.suppress(NotFound):
      found = storage.get_file_obj(request.params['bucket_name'], request.params['object_id'])
      response['x-goog-generation'] = found['generation']

  objects.download = download
  for _, methods in emulator.HANDLERS:
    methods.update({name: download for name, handler in methods.items() if handler is plain})


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
  before = {name: os.environ.get(name) for name in values}
  os.environ.update(values)
  try:
    yield
  finally:
    for name, value in before.items():
      if value is None:
        del os.environ[name]
      else:
        os.environ[name] = value
