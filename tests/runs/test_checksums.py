import errno
import json
import pathlib

import pytest

from ragen_jax.runs import checksums


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
  (tmp_path / 'state' / 'd').mkdir(parents=True)
  (tmp_path / 'state' / 'd' / 'weights').write_bytes(bytes(range(256)) * 40_000)  # more than one chunk
  (tmp_path / 'state' / 'manifest').write_bytes(b'm')
  (tmp_path / 'meta').write_text('{}')
  (tmp_path / 'empty').write_bytes(b'')
  checksums.write(tmp_path)
  return tmp_path


def test_every_file_is_named_with_the_digest_that_sha256sum_gives(checkpoint):
  record = json.loads((checkpoint / checksums.NAME).read_text())
  assert sorted(record['files']) == ['empty', 'meta', 'state/d/weights', 'state/manifest']
  assert record['files']['empty'] == 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
  assert checksums.find_damage(checkpoint) is None and checksums.exist(checkpoint)


@pytest.mark.parametrize('at', [0, 5_000_000, 40_000 * 256 - 1])
def test_one_flipped_bit_anywhere_is_found(checkpoint, at):
  path = checkpoint / 'state' / 'd' / 'weights'
  data = bytearray(path.read_bytes())
  data[at] ^= 1
  path.write_bytes(data)
  assert checksums.find_damage(checkpoint) == 'state/d/weights differs from its checksum'


@pytest.mark.parametrize('name', ['meta', 'empty', 'state/manifest'])
def test_a_missing_and_a_cut_file_are_found(checkpoint, name):
  (checkpoint / name).unlink()
  assert checksums.find_damage(checkpoint) == f'{name} is missing'
  (checkpoint / name).write_text('another')
  assert checksums.find_damage(checkpoint) == f'{name} differs from its checksum'


@pytest.mark.parametrize('text', ['', '{', '[]', '{"files": []}', '{"files": null}', '\x00\x00'])
def test_damaged_checksums_are_damage(checkpoint, text):
  (checkpoint / checksums.NAME).write_text(text)
  assert checksums.find_damage(checkpoint) is not None


def test_a_checkpoint_without_checksums_cannot_be_compared(tmp_path):
  (tmp_path / 'meta').write_text('{}')
  assert checksums.find_damage(tmp_path) is None and not checksums.exist(tmp_path)


def test_checksums_that_cannot_be_written_leave_no_file(checkpoint, monkeypatch):
  (checkpoint / checksums.NAME).unlink()

  def fail(self, target):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(pathlib.Path, 'replace', fail)
  with pytest.raises(OSError):
    checksums.write(checkpoint)
  assert not list(checkpoint.glob(f'{checksums.NAME}*'))
