"""Objects in buckets: the same in memory and on servers of S3 and Google Cloud Storage; errors are one line."""

from __future__ import annotations

import errno
import os
import sys
import types
import unittest.mock

import fsspec
import pytest

from ragen_jax.runs.stores import StoreError, is_address, open_store
from ragen_jax.utils.errors import DiskError, UserError
from tests.support.buckets import gs_server, memory_store, s3_server


@pytest.fixture(scope='module')
def s3():
  with s3_server():
    fsspec.filesystem('s3').clear_instance_cache()
    yield


@pytest.fixture(scope='module')
def gs():
  with gs_server():
    yield


@pytest.fixture(params=['memory', 's3', 'gs'])
def store(request):
  if request.param == 'memory':
    with memory_store() as found:
      yield found
  else:
    request.getfixturevalue(request.param)
    yield open_store(f'{request.param}://bucket/folder/run/')


@pytest.mark.slow_cases('gs')
def test_objects_are_written_read_listed_and_deleted(store, tmp_path):
  assert not store.url.endswith('/')
  assert store.sizes() == {} and store.read('a') is None
  store.write('a', b'first')
  store.write('a', b'second')
  assert store.read('a') == b'second'
  assert store.create('lock', b'mine') is True
  if not store.url.startswith('gs://'):  # the emulator of Google Cloud Storage ignores conditions, see below
    assert store.create('lock', b'other') is False and store.read('lock') == b'mine'
  files = {}
  for name in ('b/one', 'b/two', 'bb'):
    files[name] = tmp_path / name.replace('/', '_')
    files[name].write_bytes(name.encode() * 3)
  store.upload(files)
  assert store.sizes() == {'a': 6, 'lock': 4, 'b/one': 15, 'b/two': 15, 'bb': 6}
  assert store.sizes('b/') == {'b/one': 15, 'b/two': 15}
  store.download({'b/two': tmp_path / 'new' / 'deep' / 'two'})
  assert (tmp_path / 'new' / 'deep' / 'two').read_bytes() == b'b/two' * 3
  store.delete(['a', 'b/one', 'nothing'])
  assert sorted(store.sizes()) == ['b/two', 'bb', 'lock']
  with pytest.raises(StoreError):
    store.download({'nothing': tmp_path / 'nothing'})


def test_files_that_were_removed_are_left_out_if_that_is_allowed(store, tmp_path):
  files = {'there': tmp_path / 'there', 'removed': tmp_path / 'removed'}
  files['there'].write_bytes(b'text')
  assert store.upload(files, missing_ok=True) == {'removed'}
  assert store.read('there') == b'text' and 'removed' not in store.sizes()
  with pytest.raises(StoreError, match='No such file'):
    store.upload(files)
  assert store.upload({'there': files['there']}) == set()
  store.delete(['there'])


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_not_a_fault_of_the_bucket(monkeypatch, tmp_path, number):
  def fail(*_, **__):
    raise OSError(number, os.strerror(number))

  with memory_store() as store:
    monkeypatch.setattr(store._files, 'get_file', fail)
    with pytest.raises(DiskError) as e:
      store.download({'a': tmp_path / 'a'})
    monkeypatch.undo()
  assert str(e.value) == (
    f'{tmp_path}/a was not written: {os.strerror(number)}; TMPDIR chooses the disk of the copy of s3://bucket/run'
  )


def test_a_file_that_may_not_be_written_is_not_a_fault_of_the_bucket(store, monkeypatch, tmp_path):
  """An object that may not be read has the same error number, without the name of the file."""
  store.write('a', b'text')
  (tmp_path / 'link').symlink_to(tmp_path / 'nothing' / 'a')  # refused to root, too
  with pytest.raises(DiskError, match='link was not written: '):
    store.download({'a': tmp_path / 'link'})
  (tmp_path / 'file').touch()
  with pytest.raises(DiskError, match='file/a was not written: '):
    store.download({'a': tmp_path / 'file' / 'a'})

  def refuse(*_, **__):
    raise PermissionError(errno.EACCES, 'Access denied')

  monkeypatch.setattr(store._files, 'get_file', refuse)
  with pytest.raises(StoreError, match='Access denied') as e:
    store.download({'a': tmp_path / 'a'})
  assert e.value.lasting
  monkeypatch.undo()
  store.delete(['a'])


def test_google_cloud_storage_is_asked_to_write_a_lock_only_where_there_is_none(gs, monkeypatch):
  store = open_store('gs://bucket/run')
  asked = []

  async def refuse(method, path, *arguments, **parameters):
    asked.append(parameters.get('ifGenerationMatch'))
    raise FileExistsError(path)  # what gcsfs makes of the status 412

  monkeypatch.setattr(store._files, '_call', refuse)
  assert store.create('.lock', b'mine') is False
  assert asked == ['0']


@pytest.mark.parametrize(
  'url', ['s3://bucket', 's3://bucket/', 's3:///run', 'az://bucket/run', 'file:///tmp/run', 'http://host/run']
)
def test_an_address_of_another_form_is_refused(url):
  with pytest.raises(UserError, match=f'^--workdir={url}: must be a directory on disk, gs://BUCKET/FOLDER or s3:'):
    open_store(url)


@pytest.mark.parametrize('scheme', ['s3', 'gs'])
def test_a_bucket_that_does_not_exist_is_one_line(request, scheme):
  request.getfixturevalue(scheme)
  with pytest.raises(UserError) as e:
    open_store(f'{scheme}://nothing/run')
  assert str(e.value) == f'--workdir={scheme}://nothing/run: there is no such bucket'


@pytest.mark.parametrize(('scheme', 'package'), [('s3', 's3fs'), ('gs', 'gcsfs')])
def test_a_missing_package_is_named(monkeypatch, scheme, package):
  monkeypatch.setitem(sys.modules, package, None)
  service = {'s3': 's3', 'gs': 'gcs'}[scheme]
  monkeypatch.delitem(sys.modules['fsspec.registry']._registry, service, raising=False)  # what it has imported already
  with pytest.raises(UserError) as e:
    open_store(f'{scheme}://bucket/run')
  assert str(e.value) == (
    f'--workdir={scheme}://bucket/run: needs the package {package}; pip install -r requirements-stores.txt, or pip '
    f'install {package}'
  )


def test_a_bucket_that_cannot_be_reached_has_an_exit_status_of_its_own(monkeypatch):
  for error, status in ((ConnectionError('no route'), 75), (OSError(5, 'internal error'), 75), (PermissionError(), 0)):
    info = unittest.mock.Mock(side_effect=error)
    monkeypatch.setattr(fsspec, 'filesystem', lambda *_, info=info, **__: types.SimpleNamespace(info=info))
    if status:
      with pytest.raises(UserError, match='the bucket cannot be read') as e:
        open_store('s3://bucket/run')
      assert e.value.status == status
    else:  # the objects may be readable, see below
      open_store('s3://bucket/run')


def test_missing_credentials_are_one_line(s3, monkeypatch):
  for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
    monkeypatch.delenv(name)
  monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
  monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', '/nonexistent')
  fsspec.filesystem('s3').clear_instance_cache()
  with pytest.raises(UserError, match=r'^--workdir=s3://bucket/run: the bucket cannot be read: .*credentials') as e:
    open_store('s3://bucket/run')
  assert '\n' not in str(e.value) and e.value.status == 2
  fsspec.filesystem('s3').clear_instance_cache()


@pytest.mark.parametrize('error', [PermissionError(13, 'Forbidden'), OSError('Forbidden: b/bucket\nAccess denied')])
def test_credentials_may_be_for_objects_only(monkeypatch, error):
  """Then the bucket itself cannot be looked at; s3fs and gcsfs say so with different errors."""

  def info(path):
    raise error

  monkeypatch.setattr(fsspec, 'filesystem', lambda *_, **__: types.SimpleNamespace(info=info))
  assert open_store('gs://bucket/run').url == 'gs://bucket/run'


def test_addresses_have_a_scheme():
  assert is_address('s3://bucket/run') and is_address('az://x')
  assert not is_address('runs/a') and not is_address('/tmp/gs:/a') and not is_address('runs/s3://a')
