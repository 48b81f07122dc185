"""Scores of translations against sacreBLEU's own command line."""

import subprocess
import sys

import numpy as np

from minigpt_jax.inference.scores import score_translations

HYPOTHESES = [
    'Ein Hund läuft über die Wiese.',
    'Zwei Männer stehen vor einem Haus, und reden.',
    'Die Frau liest ein Buch.',
]
REFERENCES = [
    'Ein Hund läuft über eine grüne Wiese.',
    'Zwei Männer stehen vor einem alten Haus und reden.',
    'Die Frau liest ein Buch.',
]


def by_command(tmp_path, hypotheses, references, *arguments):
    for name, lines in (('h', hypotheses), ('r', references)):
        (tmp_path / name).write_text(''.join(f'{line}\n' for line in lines))
    command = ['sacrebleu', 'r', '-i', 'h', '-b', '-w', '6', *arguments]
    done = subprocess.run(
        [sys.executable, '-m', *command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_figures_are_those_of_sacrebleus_command(tmp_path):
    scores = score_translations(HYPOTHESES, REFERENCES, 'de')
    assert scores['exact_match'] == 1 / 3
    for name in ('bleu', 'chrf'):
        expected = by_command(tmp_path, HYPOTHESES, REFERENCES, '-m', name)
        np.testing.assert_allclose(scores[name], expected, atol=1e-5)
    assert 'tok:13a' in scores['bleu_signature']
    assert 'nc:6' in scores['chrf_signature']


def test_the_literatures_bleu_is_of_lower_cased_moses_tokens(tmp_path):
    def tokens(lines):
        return [line.lower().replace('.', ' .').replace(',', ' ,') for line in lines]

    scores = score_translations(HYPOTHESES, REFERENCES, 'de')
    arguments = '-tok', 'none', '--force'
    expected = by_command(tmp_path, tokens(HYPOTHESES), tokens(REFERENCES), *arguments)
    np.testing.assert_allclose(scores['bleu_lower_tokenized'], expected, atol=1e-5)
    shouted = score_translations([h.upper() for h in HYPOTHESES], REFERENCES, 'de')
    np.testing.assert_allclose(shouted['bleu_lower_tokenized'], expected, atol=1e-5)
    assert shouted['bleu'] < scores['bleu'] / 2
