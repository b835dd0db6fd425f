"""Episodes as Markdown and as strips of pictures."""

from __future__ import annotations

import numpy as np

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.segments import ImageSegment, TextSegment
from ragen_jax.agent.world_model.state_reward import ReplyReward
from ragen_jax.viewer.tensorboard import boards, transcript


def _episode(*heights, status=Status.SUCCESS, **more):
  pictures = [np.full((height, 3, 3), 10 * i, np.uint8) for i, height in enumerate(heights)]
  turns = [
    Turn(f'board {i}', 'go', ['Up', 'Up'], (0.25, 0.25), -0.1, True, 2, picture)
    for i, picture in enumerate(pictures[:-1])
  ]
  return Episode('A', 0, 7, turns, 'the end', status, final_picture=pictures[-1] if pictures else None, **more)


def test_a_transcript_has_each_turn_and_the_end():
  assert transcript(_episode(2, 2)).split('\n\n') == [
    '**A**, level 7: success', 'turn 1', '<pre>board 0</pre>', '<pre>go</pre>',
    'carried out: Up || Up; reward 0.5, penalty -0.1',
    'end', '<pre>the end</pre>',
  ]  # fmt: skip
  failed = transcript(_episode(status=Status.ENV_ERROR, error='step raised KeyError'))
  assert failed.startswith('**A**, level 7: env error (step raised KeyError)\n\nend')


def test_pictures_stand_side_by_side_with_white_between_and_below():
  strip = boards(_episode(2, 4, 3), gap=1)
  assert strip.shape == (4, 11, 3)
  assert (strip[:2, :3] == 0).all() and (strip[2:, :3] == 255).all() and (strip[:, 3] == 255).all()
  assert (strip[:, 4:7] == 10).all() and (strip[:3, 8:] == 20).all()
  assert boards(_episode()) is None


def test_a_transcript_tells_the_scores_of_descriptions():
  episode = _episode(2, 2, 2)
  episode.turns[1].reply_reward = ReplyReward(0.5, {'observation': 0.75, 'prediction': 1.0}, {'observation': 0.1})
  lines = transcript(episode).split('\n\n')
  told = [line for line in lines if line.startswith('described')]
  assert told == ['described: observation 0.75, prediction 1.00; state reward 0.1']
  assert lines.index(told[0]) == lines.index('turn 2') + 4


def test_the_images_that_the_policy_saw_take_the_place_of_pictures():
  episode = _episode(2, 2, 2)
  saw = [np.full((4, 3, 3), 100 + i, np.uint8) for i in range(2)]
  episode.turns[0].observation = (TextSegment('left '), ImageSegment(saw[0], 1), ImageSegment(saw[1], 1))
  strip = boards(episode, gap=1)
  assert strip.shape == (4, 15, 3)  # two images, and two pictures
  assert (strip[:, :3] == 100).all() and (strip[:, 4:7] == 101).all() and (strip[:2, 8:11] == 10).all()
  assert transcript(episode).split('\n\n')[2] == '<pre>left &#60;image&#62;&#60;image&#62;</pre>'
