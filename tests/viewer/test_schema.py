"""The keys of a record: those that are made, written and read are those of the schema."""

from __future__ import annotations

import importlib.resources
import re
import types

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.models import presets
from ragen_jax.viewer.records import Played, text_records
from ragen_jax.viewer.schema import SUMMARY_KEYS, DescriptionRecord, EpisodeRecord, TurnRecord
from ragen_jax.viewer.store import EpisodeWriter, read_episodes
from tests.support.made_up_episodes import episode_record


def check_record(record) -> None:
  """Asserts that a record has the schema's keys."""
  turns = record['turns']
  parts = [(record, EpisodeRecord), *((turn, TurnRecord) for turn in turns)]
  parts += [(described, DescriptionRecord) for turn in turns for described in turn.get('descriptions', ())]
  for part, schema in parts:
    assert schema.__required_keys__ <= set(part) <= set(schema.__annotations__)


def test_made_up_records_and_those_of_text_policies_have_the_keys_of_the_schema():
  for split in ('train', 'val'):
    check_record(episode_record(split=split))
  check_record(episode_record(described=True, seen=2))
  turn = Turn(
    'board', '<think>so</think><answer>Up</answer>', ['Up'], (1.0,), 0.0, True, 1, np.zeros((4, 4, 3), np.uint8),
    chat=[{'role': 'user', 'content': 'play'}],
  )  # fmt: skip
  played = types.SimpleNamespace(episodes=[Episode('A', 0, 7, [turn], status=Status.SUCCESS)])
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  (record,) = text_records(Played(played, tokenizer, 3, 'random', 1), [0], whole=True)
  check_record(record)
  assert record['turns'][0]['pieces'] == ['<think>so</think>', '<answer>Up</answer>']


def test_the_first_line_of_a_file_has_the_summary_and_the_others_have_the_rest(tmp_path):
  EpisodeWriter(tmp_path).write('train', 1, [episode_record(split='train')])
  (file,) = read_episodes(tmp_path)
  assert set(file.episodes[0]) == {*SUMMARY_KEYS, 'turns', 'picture'}
  (record,) = file.records()
  check_record({name: x for name, x in record.items() if name != 'picture'})


def test_the_page_reads_keys_of_the_schema_and_all_but_a_few():
  page = importlib.resources.files('ragen_jax.viewer').joinpath('page.html').read_text(encoding='utf-8')
  script = re.search(r'<script>(.*?)</script>', page, re.DOTALL)[1]
  turn_keys, episode_keys = set(TurnRecord.__annotations__), set(EpisodeRecord.__annotations__)
  reads = {name: set(re.findall(rf'\b{name}\.([a-z_]+)\b(?!\()', script)) for name in ('turn', 'episode', 'whole')}
  assert reads['turn'] <= turn_keys and reads['episode'] | reads['whole'] <= episode_keys
  assert {'pieces', 'forced', 'valid', 'reward'} <= reads['turn'] and {'turns', 'learnt'} <= reads['episode']
  # The kinds of colour of a token, and one-letter names of episodes and turns in short functions.
  words = set(re.findall(r'[a-z_]+', script))
  assert {'logprob', 'entropy', 'value', 'advantage'} <= words
  unread = {key for key in turn_keys | episode_keys if not re.search(rf'\.{key}\b', script)} - {'entropy'}
  assert unread == {'group'}
