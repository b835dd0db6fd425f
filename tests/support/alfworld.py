"""Small games in the form of ALFWorld's: a room of our own, in the six types of tasks, with its words and its rules.

The facts have the names of ALFWorld's, so that the same room can be played by the rules of the package alfworld.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

# Things to put things in, by kind: how many there are, and whether they are opened and closed.
PLACES = {
  'Cabinet': (2, True),
  'CounterTop': (1, False),
  'Fridge': (1, True),
  'Microwave': (1, True),
  'Desk': (1, False),
}
_BASIN = 'Sink_bar_1_bar_SinkBasin'
_LAMP = 'DeskLamp_bar_1'
# Type of a task: its words, and its goal.
_MUGS, _APPLE = ('(objectType ?m MugType)', '(objectType ?n MugType) (not (= ?m ?n))'), '(objectType ?o AppleType)'


def _put(kind: str, place: str, also: str = '') -> str:
  return (
    f'(exists (?o - object ?r - receptacle) (and (objectType ?o {kind}Type) (receptacleType ?r {place}Type) '
    f'(inReceptacle ?o ?r) {also}))'
  )


TASKS = {
  'pick_and_place_simple': ('put a mug in desk.', _put('Mug', 'Desk')),
  'look_at_obj_in_light': (
    'look at apple under the desklamp.',
    f'(exists (?a - agent ?l - location ?r - receptacle ?o - object) (and (holds ?a ?o) {_APPLE} (atLocation ?a ?l) '
    f'(receptacleAtLocation ?r ?l) (inReceptacle {_LAMP} ?r) (isToggled {_LAMP})))',
  ),
  'pick_clean_then_place_in_recep': ('put a clean apple in fridge.', _put('Apple', 'Fridge', '(isClean ?o)')),
  'pick_heat_then_place_in_recep': ('heat some apple and put it in desk.', _put('Apple', 'Desk', '(isHot ?o)')),
  'pick_cool_then_place_in_recep': ('cool some mug and put it in desk.', _put('Mug', 'Desk', '(isCool ?o)')),
  'pick_two_obj_and_place': (
    'put two mug in desk.',
    f'(exists (?r - receptacle ?m - object ?n - object) (and (receptacleType ?r DeskType) {_MUGS[0]} {_MUGS[1]} '
    '(inReceptacle ?m ?r) (inReceptacle ?n ?r)))',
  ),
}


def problem(task: str, number: int, *, name: str = 'room', cabinets: int = 2) -> str:
  """A room with a task, in PDDL; another number puts the things elsewhere."""
  places = {
    f'{kind}_bar_{i + 1}': (f'{kind}Type', opens)
    for kind, (count, opens) in PLACES.items()
    for i in range(cabinets if kind == 'Cabinet' else count)
  }
  places[_BASIN] = ('SinkBasinType', False)
  spots = [place for _, place, _ in _SPOTS]
  things = {
    'Apple_bar_1': ('AppleType', spots[number % 5]),
    'Mug_bar_1': ('MugType', spots[(number + 1) % 5]),
    'Mug_bar_2': ('MugType', spots[(number + 3) % 5]),
    _LAMP: ('DeskLampType', 'Desk_bar_1'),
  }
  kinds, kinds_of_places = ({kind for kind, _ in x.values()} for x in (things, places))
  at = {place: f'loc_bar_{i}' for i, place in enumerate(places)}
  facts = ['(= (total-cost) 0)', '(atLocation agent1 loc_bar_start)']
  for place, (kind, opens) in places.items():
    facts += [f'(receptacleAtLocation {place} {at[place]})', f'(receptacleType {place} {kind})']
    facts += [f'(openable {place})'] * opens
  for thing, (kind, place) in things.items():
    facts += [
      f'(objectType {thing} {kind})',
      f'(inReceptacle {thing} {place})',
      f'(objectAtLocation {thing} {at[place]})',
    ]
    able = ('toggleable',) if thing == _LAMP else ('pickupable', 'cleanable', 'heatable', 'coolable')
    facts += [f'({x} {thing})' for x in able]
  facts += [f'(canContain {place} {kind})' for place in sorted(kinds_of_places) for kind in sorted(kinds)]
  objects = [
    'agent1 - agent', *(f'{x} - receptacle' for x in places), *(f'{x} - object' for x in things),
    *(f'{x} - location' for x in (*at.values(), 'loc_bar_start')), *(f'{x} - otype' for x in sorted(kinds)),
    *(f'{x} - rtype' for x in sorted(kinds_of_places)),
  ]  # fmt: skip
  return (
    f'(define (problem {name}) (:domain alfred)\n(:objects {" ".join(objects)})\n'
    f'(:init\n{chr(10).join(facts)}\n)\n(:goal {TASKS[task][1]})\n(:metric minimize (total-cost)))\n'
  )


# Where things are: the name of the place, its id, and whether it is opened first.
_SPOTS = (
  ('cabinet 2', 'Cabinet_bar_1', True), ('countertop 1', 'CounterTop_bar_1', False),
  ('microwave 1', 'Microwave_bar_1', True), ('cabinet 1', 'Cabinet_bar_2', True), ('sinkbasin 1', _BASIN, False),
)  # fmt: skip
_OFFSETS = {'apple 1': 0, 'mug 2': 1, 'mug 1': 3}


def fetch(thing: str, number: int) -> list[str]:
  """The commands that get a thing of a room, as the package alfworld names it."""
  place, _, opens = _SPOTS[(number + _OFFSETS[thing]) % 5]
  return ['look', f'go to {place}', *[f'open {place}'] * opens, f'take {thing} from {place}']


def _bring(thing: str, to: str) -> list[str]:
  return [f'go to {to}', *[f'open {to}'] * (to == 'fridge 1'), f'move {thing} to {to}']


def _with(verb: str, thing: str, place: str) -> list[str]:
  return [f'go to {place}', f'{verb} {thing} with {place}']


# Type of a task: the commands that fulfil it in the room of a number.
WALKTHROUGHS = {
  'pick_and_place_simple': lambda i: [*fetch('mug 2', i), *_bring('mug 2', 'desk 1')],
  'look_at_obj_in_light': lambda i: [*fetch('apple 1', i), 'go to desk 1', 'use desklamp 1'],
  'pick_clean_then_place_in_recep': lambda i: [
    *fetch('apple 1', i), *_with('clean', 'apple 1', 'sinkbasin 1'), *_bring('apple 1', 'fridge 1')
  ],
  'pick_heat_then_place_in_recep': lambda i: [
    *fetch('apple 1', i), *_with('heat', 'apple 1', 'microwave 1'), *_bring('apple 1', 'desk 1')
  ],
  'pick_cool_then_place_in_recep': lambda i: [
    *fetch('mug 1', i), *_with('cool', 'mug 1', 'fridge 1'), *_bring('mug 1', 'desk 1')
  ],
  'pick_two_obj_and_place': lambda i: [
    *fetch('mug 1', i), *_bring('mug 1', 'desk 1'), *fetch('mug 2', i)[1:], *_bring('mug 2', 'desk 1')
  ],
}  # fmt: skip


def write_game(
  split: pathlib.Path,
  task: str,
  number: int,
  *,
  walkthrough: Sequence[str] | None = None,
  trial: str = '',
  **changes: Any,
) -> str:
  """Writes the files of a game into a folder of its own; returns the path of the game file.

  Args:
    changes: fields of the game file, such as `solvable`, and `cabinets` of `problem`.
  """
  trial = trial or f'trial_{number}'
  folder = split / f'{task}-Thing-None-Place-1' / trial
  folder.mkdir(parents=True)
  size = {'cabinets': changes.pop('cabinets')} if 'cabinets' in changes else {}
  game = {
    'pddl_domain': DOMAIN, 'grammar': GRAMMAR, 'pddl_problem': problem(task, number, name=trial, **size),
    'solvable': True, 'walkthrough': walkthrough,
  } | changes  # fmt: skip
  game['grammar'] = game['grammar'].replace('UNKNOWN GOAL.', TASKS[task][0])
  (folder / 'game.tw-pddl').write_text(json.dumps(game))
  (folder / 'traj_data.json').write_text(json.dumps({'task_type': task, 'task_id': trial}))
  return str(folder / 'game.tw-pddl')


# -- the rules ---------------------------------------------------------------------------------------------------------

_HERE = '(atLocation ?a ?l) (receptacleAtLocation ?r ?l)'
_OPEN = '(or (not (openable ?r)) (opened ?r))'


def _action(name: str, parameters: str, needs: str, does: str) -> str:
  return f'(:action {name} :parameters ({parameters}) :precondition (and {needs}) :effect (and {does}))\n'


_PLACE = '?a - agent ?l - location ?r - receptacle'
_THING = f'{_PLACE} ?o - object'
_HOLDING = f'{_HERE} (holds ?a ?o)'
DOMAIN = (
  """(define (domain alfred)
(:requirements :adl :typing :action-costs)
(:types agent location receptacle object rtype otype)
(:predicates (atLocation ?a - agent ?l - location) (receptacleAtLocation ?r - receptacle ?l - location)
(objectAtLocation ?o - object ?l - location) (inReceptacle ?o - object ?r - receptacle) (openable ?r - receptacle)
(opened ?r - receptacle) (receptacleType ?r - receptacle ?t - rtype) (objectType ?o - object ?t - otype)
(canContain ?t - rtype ?o - otype) (holds ?a - agent ?o - object) (holdsAny ?a - agent) (pickupable ?o - object)
(cleanable ?o - object) (heatable ?o - object) (coolable ?o - object) (toggleable ?o - object) (isClean ?o - object)
(isHot ?o - object) (isCool ?o - object) (isToggled ?o - object) (checked ?x))
(:functions (total-cost) - number)
"""
  + _action('look', '?a - agent ?l - location', '(atLocation ?a ?l)', '(checked ?l)')
  + _action('inventory', '?a - agent', '', '(checked ?a)')
  + _action(
    'gotolocation', '?a - agent ?f - location ?l - location ?r - receptacle',
    '(atLocation ?a ?f) (receptacleAtLocation ?r ?l)',
    '(not (atLocation ?a ?f)) (atLocation ?a ?l) (increase (total-cost) 1)',
  )
  + _action('openobject', _PLACE, f'{_HERE} (openable ?r) (not (opened ?r))', '(opened ?r) (increase (total-cost) 1)')
  + _action('closeobject', _PLACE, f'{_HERE} (openable ?r) (opened ?r)', '(not (opened ?r)) (increase (total-cost) 1)')
  + _action(
    'pickupobject', _THING, f'{_HERE} (pickupable ?o) (inReceptacle ?o ?r) (not (holdsAny ?a)) {_OPEN}',
    '(not (inReceptacle ?o ?r)) (not (objectAtLocation ?o ?l)) (holds ?a ?o) (holdsAny ?a) (increase (total-cost) 1)',
  )
  + _action(
    'putobject', _THING, f'{_HOLDING} {_OPEN}',
    '(inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) (not (holdsAny ?a)) (increase (total-cost) 1)',
  )
  + _action(
    'cleanobject', _THING, f'{_HOLDING} (receptacleType ?r SinkBasinType)', '(isClean ?o) (increase (total-cost) 1)'
  )
  + _action(
    'heatobject', _THING, f'{_HOLDING} (heatable ?o) (receptacleType ?r MicrowaveType)',
    '(isHot ?o) (not (isCool ?o)) (increase (total-cost) 1)',
  )
  + _action(
    'coolobject', _THING, f'{_HOLDING} (coolable ?o) (receptacleType ?r FridgeType)',
    '(isCool ?o) (not (isHot ?o)) (increase (total-cost) 1)',
  )
  + _action(
    'toggleobject', _THING, f'{_HERE} (toggleable ?o) (inReceptacle ?o ?r)', '(isToggled ?o) (increase (total-cost) 1)'
  )
  + ')\n'
)  # fmt: skip

# -- the words ---------------------------------------------------------------------------------------------------------

_INSIDE = "[{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}]"
_RULES = {
  'intro': [{'rhs': '#around#\n\nYour task is to: UNKNOWN GOAL.'}],
  'around': [{'rhs': "You stand in a room. There is #places#."}],
  'places': [{'rhs': "[{r.indefinite + ' ' + r.name | receptacleatlocation(r:receptacle, l:location)}]"}],
  'contents': [
    {'condition': 'openable(r:receptacle) & opened(r:receptacle)', 'rhs': f'The open {{r.name}} has {_INSIDE}.'},
    {'condition': 'openable(r:receptacle)', 'rhs': 'The {r.name} is shut.'},
    {'rhs': f'On the {{r.name}} there is {_INSIDE}.'},
  ],
  'list_empty': [{'rhs': 'nothing'}],
  'list_separator': [{'rhs': ', '}],
  'list_last_separator': [{'rhs': ' and '}],
  'shut': [{'rhs': 'The {r.name} is shut now.'}],
  'took': [{'rhs': 'You hold the {o.name} from the {r.name}.'}],
  'placed': [{'rhs': 'The {o.name} is in the {r.name} now.'}],
  'clean': [{'rhs': 'The {o.name} is clean.'}],
  'hot': [{'rhs': 'The {o.name} is hot.'}],
  'cool': [{'rhs': 'The {o.name} is cool.'}],
  'on': [{'rhs': 'The {o.name} is on.'}],
  'carried': [{'rhs': "You hold [{o.name | holds(a:agent, o:object)}]."}],
}  # fmt: skip
_COMMANDS = {
  'gotolocation': ('go to [{r.name | receptacleatlocation(r:receptacle, l:location)}]', 'contents'),
  'look': ('look', 'around'),
  'inventory': ('inventory', 'carried'),
  'openobject': ('open {r}', 'contents'),
  'closeobject': ('close {r}', 'shut'),
  'pickupobject': ('take {o} from {r}', 'took'),
  'putobject': ('move {o} to {r}', 'placed'),
  'cleanobject': ('clean {o} with {r}', 'clean'),
  'heatobject': ('heat {o} with {r}', 'hot'),
  'coolobject': ('cool {o} with {r}', 'cool'),
  'toggleobject': ('use {o}', 'on'),
}
GRAMMAR = f'grammar :: """\n{json.dumps(_RULES, indent=1)}\n""";\n' + ''.join(
  f'action {name} {{\n  template :: "{template}";\n  feedback :: "#{rule}#";\n}}\n'
  for name, (template, rule) in _COMMANDS.items()
)
