"""Which item a seed selects, and which items are held out. Both are the same on every machine and in every version."""

from __future__ import annotations

import hashlib
import unicodedata

SPLITS = ('all', 'train', 'test')  # parts of a source
_MASK = (1 << 64) - 1
_ROUNDS = 6
_DIGEST = 12  # bytes; two of a million items collide with a probability of 1e-17


def digest(text: str) -> str:
  """The identity of a question or a group, without differences of letter case, white space and Unicode's forms."""
  plain = ' '.join(unicodedata.normalize('NFKC', text).casefold().split())
  return hashlib.blake2b(plain.encode('utf-8', 'surrogatepass'), digest_size=_DIGEST).hexdigest()


def is_held_out(identity: str, share: float) -> bool:
  """Whether a digest belongs to the test split, which has about this share of all digests.

  A larger share keeps what a smaller one holds out.
  """
  number = int.from_bytes(hashlib.blake2b(b'split' + identity.encode(), digest_size=8).digest(), 'big')
  return number < share * 2.0**64


def permuted(index: int, size: int, key: int = 0) -> int:
  """The place of an index under a pseudorandom permutation of 0 .. size - 1.

  A Feistel network permutes the numbers of an even number of bits. It is applied until the result is below `size`, as
  Black and Rogaway describe ("Ciphers with arbitrary finite domains", 2002, section 3); that takes at most
  four rounds on average. The result needs neither a table nor a version of a random generator.

  Args:
    key: chooses the permutation.
  """
  half, mask = _halves(index, size)
  while True:
    left, right = index >> half, index & mask
    for i in range(_ROUNDS):
      left, right = right, left ^ (_mix(right ^ _mix(_mix(key) + i)) & mask)
    index = left << half | right
    if index < size:
      return index


def unpermuted(place: int, size: int, key: int = 0) -> int:
  """The index that `permuted` puts at a place."""
  half, mask = _halves(place, size)
  while True:
    left, right = place >> half, place & mask
    for i in reversed(range(_ROUNDS)):
      left, right = right ^ (_mix(left ^ _mix(_mix(key) + i)) & mask), left
    place = left << half | right
    if place < size:
      return place


def _halves(index: int, size: int) -> tuple[int, int]:
  """The number of bits of each half of the network, and their mask; ValueError if the index is not below the size."""
  if not 0 <= index < size:
    raise ValueError(f'index={index}; allowed: from 0 to {size - 1}')
  half = max(((size - 1).bit_length() + 1) // 2, 1)
  return half, (1 << half) - 1


def _mix(number: int) -> int:
  """splitmix64's output function (Steele et al. 2014, "Fast splittable pseudorandom number generators", figure 16)."""
  number = (number + 0x9E3779B97F4A7C15) & _MASK
  number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
  number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
  return number ^ number >> 31


def select(seed: int, size: int, order: str) -> int:
  """The index of the item of a seed: consecutive seeds select all items before one comes again.

  Args:
    order: 'shuffled', or 'fixed' for the order of the items.
  """
  return permuted(seed % size, size) if order == 'shuffled' else seed % size


def seed_of(index: int, size: int, order: str) -> int:
  """The smallest seed that selects the item of an index; `order` as for `select`."""
  return unpermuted(index, size) if order == 'shuffled' else index
