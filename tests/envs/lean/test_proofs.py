"""Lean texts: which statements are read, which tactics are refused, and what messages mean."""

from __future__ import annotations

import pytest

from ragen_jax.envs.lean import proofs
from ragen_jax.envs.lean.proofs import Checked, Message, read_outcome, read_statement, write_draft
from tests.support.environments import raises_one_line


@pytest.mark.parametrize('ending', [' := by', ' := by sorry', ' :=\n  by\n    sorry', ' := sorry', ' :=', ' := by\n'])
def test_a_statement_may_end_in_several_ways(ending):
  read = read_statement(f"import Mathlib\r\n\nopen Nat\n\ntheorem a_1' (n : Nat)\n  : n = n{ending}")
  assert read.name == "a_1'" and read.imports == 'import Mathlib'
  assert ' '.join(read.text.split()) == "open Nat theorem a_1' (n : Nat) : n = n := by"


@pytest.mark.parametrize('raw', [3, '', 'theorem a : True', 'example : True := by', 'theorem a : True := trivial'])
def test_other_statements_are_refused(raw):
  with raises_one_line(r"^allowed: a theorem or lemma with a name that ends in ':= by', with or without 'sorry'$"):
    read_statement(raw)
  with raises_one_line('allowed: text, not 3, beside the statement'):
    read_statement('theorem a : True := by', informal=3)


@pytest.mark.parametrize(
  ('head', 'name'),
  [
    ('theorem foo.{u} (a : Type u)', 'foo'), ('theorem A.foo.{u, v}', 'A.foo'), ('theorem «x y»', '«x y»'),
    ('lemma A.«x (y»(n : Nat)', 'A.«x (y»'), ('theorem _root_.foo', 'foo'), ('theorem _root_.A.b', 'A.b'),
    ('theorem a -- lemma b\n', 'a'), ('/- a theorem b /- of -/ lemma c -/ theorem a', 'a'),
    ('-- the lemma /- b\ntheorem a', 'a'), ('theorem a : "--" = "/-" ∧ True', 'a'), ('theorem a /- lemma b', None),
    ('-- theorem a', None), ('theorem a (x : "b") -- lemma b\n', 'a'),
  ],
)  # fmt: skip
def test_the_name_of_a_theorem(head, name):
  text = f'{head} : True := by'
  if name is None:
    with raises_one_line('^allowed: a theorem'):
      read_statement(text)
  else:
    assert read_statement(text).name == name and read_statement(text).text == text


def test_names_and_comments_do_not_tell_theorems_apart():
  same = (
    'theorem a : a = A := by',
    'lemma Nat.b.{u} : a = A := by',
    'theorem «a b» /- so -/ : a = A := by -- x\n sorry',
  )
  plain = [' '.join(read_statement(text).identity.replace('{u}', '').split()) for text in same]
  assert plain == ['theorem : a = A := by'] * 3
  assert read_statement('open Nat\ntheorem a : a = 2 := by').identity == 'open Nat\ntheorem  : a = 2 := by'


def test_the_preamble_is_that_of_the_row_or_of_the_statement_or_the_usual_one():
  bare, own = 'theorem a : True := by', 'import Mathlib.Tactic\ntheorem a : True := by'
  assert write_draft(read_statement(bare), [], 'import X').code == (
    'import X\n\ntheorem a : True := by\n  skip\n\n#print axioms a\n'
  )
  assert write_draft(read_statement(own), [], 'import X').code.startswith('import Mathlib.Tactic\n\ntheorem')
  assert write_draft(read_statement(own, 'import Y\nopen Z\n'), [], 'import X').code.startswith(
    'import Y\nopen Z\n\nth'
  )


def test_lines_of_a_draft_are_counted_as_they_stand():
  draft = write_draft(
    read_statement('open Nat in\ntheorem a :\n  True := by'), ['skip\nskip', '· trivial'], 'import X\nopen Y'
  )
  lines = draft.code.split('\n')
  assert lines[draft.first - 2 : draft.first + 2] == ['  True := by', '  skip', '  skip', '  · trivial']
  assert lines[draft.last - 1 :] == ['#print axioms a', '']


@pytest.mark.parametrize(
  ('text', 'block'),
  [
    ('simp', 'simp'),
    ('  intro x\n    simp  \n', 'intro x\n  simp'),
    ('\n\tsimp\n', 'simp'),
    ('```lean4\nsimp\n  ring\n```', 'simp\n  ring'),
    ('```lean\n```', ''),
  ],
)
def test_tactics_are_read_from_column_0(text, block):
  assert proofs.read_tactics(text) == block


@pytest.mark.parametrize(
  ('tactics', 'word'),
  [
    ('exact foo\nsorry', 'sorry'), ('exact sorryAx _ true', 'sorryAx'), ('admit', 'admit'), ('#eval 1', '#eval'),
    ('trivial\n  macro "#print" x:ident : command => `(command| #check 1)', 'macro'), ('trivial end A', 'end'),
    ('run_tac pure ()', 'run_tac'), ('exact (Lean.reduceBool x)', 'Lean.reduceBool'), ('axiom a : False', 'axiom'),
    ('skip @[simp] x', '@['), ('set_option debug.skipKernelTC true in simp', 'set_option'), ('stop', 'stop'),
    ('theorem x : False := y', 'theorem'), ('namespace A', 'namespace'), ("exact 'a'macro", 'macro'),
    ('open Lean in exact x', 'open Lean'), ('open Nat Lean.Elab in x', 'open Nat'), ('open Nat', 'open Nat'),
    ('open Nat in open Lean in x', 'open Lean'), ('open\n  Lean in x', 'open'),
    ('open Nat -- in\n Lean in x', 'open Nat'), ('open _root_.Lean in x', 'open _root_.Lean'),
    ('open «Lean» in x', 'open Lean'), ('exact «Lean».reduceBool x', 'Lean.reduceBool'),
    ('exact _root_.Lean.reduceBool x', '_root_.Lean.reduceBool'), ('by_elab x', 'by_elab'), ('apply?', 'apply?'),
    ('all_goals hint', 'hint'), ('constructor <;> plausible', 'plausible'),
  ],
)  # fmt: skip
def test_words_that_end_or_admit_a_theorem_are_forbidden(tactics, word):
  assert proofs.forbidden(tactics) == word


@pytest.mark.parametrize(
  'word',
  [
    'simproc', 'simproc_decl', 'dsimproc', 'dsimproc_decl', 'builtin_dsimproc', 'builtin_initialize', 'elab_rules',
    'declare_config_elab', 'declare_simp_like_tactic', 'declare_syntax_cat', 'declare_aesop_rule_sets', 'elab_stx',
    'register_simp_attr', 'register_option', 'binder_predicate', 'unif_hint', 'with_weak_namespace', 'unset_option',
    'add_aesop_rules', 'erase_aesop_rules', 'suppress_compilation', 'initialize_simps_projections', 'initialize',
    'mk_iff_of_inductive_prop', 'proof_wanted', 'recall', 'include_str', 'include', 'run_cmd', 'run_meta', 'elab',
    'grind_propagator', 'builtin_grind_propagator', 'polyrith', 'slim_check',
  ],
)  # fmt: skip
def test_commands_that_define_things_or_run_programs_are_forbidden(word):
  assert proofs.forbidden(f'trivial\n{word} x') == word
  assert proofs.forbidden(f'exact h.{word} {word}_') in ('', f'{word}_')  # a part of a name is none, at most its family


@pytest.mark.parametrize(
  'tactics',
  [
    'exact h.end', 'simp [Nat.lemma, foo_def, sorry_free]', 'open Real in simp', 'have endpoint := a.section',
    'exact ⟨h, #[1, 2].size_eq⟩', 'rcases h with ⟨x, rfl⟩', 'calc a = b := by ring\n  _ = c := by simp', "exact def'",
    'open Nat Real in simp', 'open Finset (sum_comm) in\nsimp', 'exact?', 'exact Lean4.h', 'relabel x', 'intro opened',
    'simp [add_comm, mk_iff, x_run, hint_1]',
  ],
)  # fmt: skip
def test_usual_tactics_are_not(tactics):
  assert proofs.forbidden(tactics) == ''


STATEMENT = read_statement('theorem a :\n  P ∧ Q := by')
DRAFT = write_draft(STATEMENT, ['constructor', 'simp'], 'import Mathlib\n\nopen Nat')
SHIFT = 2  # lines that the server leaves out
BY, FIRST, SECOND = DRAFT.first - 1 - SHIFT, DRAFT.first - SHIFT, DRAFT.first + 1 - SHIFT


def axioms(*names, of='a', line=None):
  told = f'depends on axioms: [{", ".join(names)}]' if names else 'does not depend on any axioms'
  return Message('info', DRAFT.last - SHIFT if line is None else line, f"'{of}' {told}")


def error(line, text):
  return Message('error', line, text)


LEFT = error(BY, 'unsolved goals\ncase left\nh : Nat\n⊢ P\n\ncase right\n⊢ Q')


@pytest.mark.parametrize(
  ('messages', 'kind', 'reason'),
  [
    ([axioms()], proofs.PROVED, ''),
    ([axioms('propext', 'Classical.choice', 'Quot.sound', of='A.b.a')], proofs.PROVED, ''),
    ([Message('info', 1, 'Try this'), Message('warning', FIRST, 'unused'), axioms('propext')], proofs.PROVED, ''),
    ([axioms('propext', 'sorryAx')], proofs.REJECTED, 'It uses the axiom sorryAx, which a proof may not use.'),
    ([LEFT, axioms('sorryAx')], proofs.OPEN, ''),
    ([LEFT, axioms('Lean.ofReduceBool', 'sorryAx')], proofs.REJECTED, 'axiom Lean.ofReduceBool'),
    ([error(FIRST, 'unsolved goals\n⊢ False'), axioms('sorryAx')], proofs.REJECTED, 'line 1: unsolved goals'),
    ([LEFT, error(SECOND, 'unsolved goals\n⊢ False'), axioms('sorryAx')], proofs.REJECTED, 'line 2: unsolved goals'),
    ([error(SECOND, 'oops'), LEFT, axioms('sorryAx')], proofs.REJECTED, 'line 2: oops'),
    ([error(BY, 'the statement is wrong'), axioms('sorryAx')], proofs.REJECTED, 'the statement is wrong'),
    ([error(SECOND, 'unexpected end of input')], proofs.REJECTED, 'unexpected end of input'),
  ],
)
def test_what_messages_mean(messages, kind, reason):
  outcome = read_outcome(DRAFT, Checked(tuple(messages)))
  assert outcome.kind == kind and reason in outcome.reason and bool(reason) == bool(outcome.reason) and outcome.is_read
  assert outcome.goals == (('case left\nh : Nat\n⊢ P', 'case right\n⊢ Q') if kind == proofs.OPEN else ())


def test_an_error_in_the_statement_has_no_line_of_the_proof():
  outcome = read_outcome(DRAFT, Checked((error(BY, 'bad'), axioms('sorryAx'))))
  assert outcome.reason == 'bad'


def test_sorry_and_time_outs_are_no_proofs():
  assert read_outcome(DRAFT, Checked((LEFT, axioms('sorryAx')), has_sorry=True)).reason == 'It uses sorry.'
  assert read_outcome(DRAFT, Checked(timed_out=True)).kind == proofs.TIMED_OUT


@pytest.mark.parametrize('messages', [[], [axioms(of='b')], [axioms(of='ba')], [Message('warning', 1, axioms().text)]])
def test_an_answer_without_the_theorems_axioms_is_not_read(messages):
  assert not read_outcome(DRAFT, Checked(tuple(messages))).is_read


def test_axioms_may_stand_on_several_lines():
  text = "'a' depends on axioms: [propext,\n Classical.choice,\n my_axiom]"
  outcome = read_outcome(DRAFT, Checked((Message('info', DRAFT.last - SHIFT, text),)))
  assert outcome.reason == 'It uses the axiom my_axiom, which a proof may not use.'


def test_the_last_message_about_axioms_counts():
  first = axioms(line=FIRST)
  assert read_outcome(DRAFT, Checked((first, axioms('cheat')))).kind == proofs.REJECTED
  # And it tells how lines are counted, here without the imports.
  assert read_outcome(DRAFT, Checked((first, LEFT, axioms('sorryAx')))).kind == proofs.OPEN


def test_axioms_of_all_messages_count_in_any_order():
  # As for a name that is ambiguous, or where tactics print such a message.
  for messages in ([axioms('cheat', of='A.a', line=FIRST), axioms()], [axioms(line=FIRST), axioms('cheat', of='A.a')]):
    outcome = read_outcome(DRAFT, Checked(tuple(messages)))
    assert (outcome.kind, outcome.reason) == (proofs.REJECTED, 'It uses the axiom cheat, which a proof may not use.')
  assert read_outcome(DRAFT, Checked((axioms('propext'), axioms(of='A.a')))).kind == proofs.PROVED


@pytest.mark.parametrize(
  ('name', 'told'), [('_root_.b', 'b'), ('c.{u}', 'c'), ('«x y»', '«x y»'), ('A.«d»', 'A.d'), ('_root_.A.b', 'A.b')]
)
def test_lean_names_a_theorem_as_it_does(name, told):
  draft = write_draft(read_statement(f'theorem {name} : True := by'), ['trivial'], '')
  assert read_outcome(draft, Checked((axioms(of=told),))).kind == proofs.PROVED
  assert not read_outcome(draft, Checked((axioms(of=f'{told}x'),))).is_read


def test_targets_leave_out_hypotheses_and_numbers_of_unknown_terms():
  assert proofs.targets(['h : a\n⊢ P  ?m.12\n  x', '⊢ Q']) == ('P ?m x', 'Q')
  assert proofs.same_goals(['h : ?m.1\n⊢ P'], ['h : ?m.2\n  ⊢ P'])
  assert not proofs.same_goals(['h : a\n⊢ P'], ['⊢ P'])


@pytest.mark.parametrize(
  'response',
  [
    {'messages': 3}, {'messages': ['x']}, {'messages': [{'severity': 'error', 'data': 'x'}]}, {'sorries': 'x'},
    {'messages': [{'severity': 'error', 'pos': {'line': '1'}, 'data': 'x'}]},
    {'messages': [{'severity': 'error', 'pos': {'line': 1}, 'data': None}]},
  ],
)  # fmt: skip
def test_answers_of_another_form_are_named(response):
  with pytest.raises(ValueError, match=r'is no list|are no list|has no severity'):
    proofs.read_messages(response)


def test_missing_messages_are_none():
  assert proofs.read_messages({'env': 0}) == Checked()
  assert proofs.read_messages({'messages': None, 'sorries': [{}]}) == Checked(has_sorry=True)
