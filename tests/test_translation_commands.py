"""The commands translate and evaluate, as a user types them."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from minigpt_jax.data import tokenizers
from tests.conftest import ROOT
from tests.test_commands import TINY, run

pytestmark = pytest.mark.slow

WORDS = ['abc', '', 'hgfedcba', 'a', 'bb']


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    """A short run that copies words, by the command; most of what it says is wrong."""
    root = tmp_path_factory.mktemp('copy')
    done = run(
        'train', '--config=configs/translate_dates.py', *TINY, '--config.data.corpus=copy',
        '--config.model.context_length=12', '--config.data.validation_fraction=0.01',
        '--config.eval.decoded_pairs=50', f'--workdir={root / "run"}',
    )  # fmt: skip
    assert re.search(r'batches of pairs × \(source \+ target\): 8 × \(9 \+ 9\); .*% is padding',
                     done.stdout)  # fmt: skip
    assert 'exact match' in (root / 'run' / 'report.md').read_text()
    return root / 'run'


def piped(workdir, text, *arguments):
    return subprocess.run(
        [sys.executable, '-m', 'minigpt_jax.translate', f'--workdir={workdir}', *arguments],
        cwd=ROOT, input=text, capture_output=True, timeout=300,
    )  # fmt: skip


def test_a_line_in_is_a_line_out_from_a_pipe_a_file_and_an_argument(workdir, tmp_path):
    text = ''.join(f'{word}\n' for word in WORDS)
    done = piped(workdir, text.encode())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().removesuffix('\n').split('\n')
    assert len(lines) == len(WORDS)
    assert lines[1] == ''
    (tmp_path / 'words').write_text(text)
    from_file = run('translate', f'--workdir={workdir}', f'--input={tmp_path / "words"}')
    assert from_file.stdout == done.stdout.decode()
    one = run('translate', f'--workdir={workdir}', '--text=hgfedcba')
    assert one.stdout == f'{lines[2]}\n'


def test_several_translations_with_scores_best_first(workdir):
    done = run(
        'translate', f'--workdir={workdir}', '--text=abc', '--beam=4', '--nbest=3', '--scores'
    )
    scores, texts = zip(*(line.split('\t') for line in done.stdout.splitlines()), strict=True)
    assert len(set(texts)) == 3
    assert [*map(float, scores)] == sorted(map(float, scores), reverse=True)
    done = piped(workdir, b'\nabc\n', '--beam=4', '--nbest=3', '--scores')
    assert done.stdout.decode().splitlines()[:3] == ['', '', '']
    assert done.stdout.decode().splitlines()[3:] == [*map('{}\t{}'.format, scores, texts)]


def test_the_alignment_of_one_line_is_drawn(workdir, tmp_path):
    picture = tmp_path / 'alignment.png'
    arguments = [f'--workdir={workdir}', '--text=abc', f'--alignment={picture}']
    run('translate', *arguments)
    mean = picture.read_bytes()
    assert mean.startswith(b'\x89PNG')
    run('translate', *arguments, '--layer=0', '--head=1')
    assert picture.read_bytes() != mean


def test_a_line_that_is_too_long_is_named_and_the_others_are_answered(workdir):
    done = piped(workdir, b'abc\nabcdefghabcd\nabc\n')
    assert done.returncode == 1
    first, second, third = done.stdout.decode().removesuffix('\n').split('\n')
    assert (first, second) == (third, '')
    assert done.stderr.decode().count('\n') == 1
    assert 'line 2: longer than the 12 tokens that the model takes' in done.stderr.decode()


@pytest.mark.parametrize(
    ('arguments', 'text', 'line'),
    [
        ((), b'ab\xff\n', 'standard input is not UTF-8 text: byte 0xff at offset 2'),
        (('--nbest=2',), b'', '--nbest=2: at most --beam=1'),
        (('--length_penalty=nan',), b'', '--length_penalty=nan: must be a finite number'),
        (('--layer=0',), b'', '--layer=0: is about the figure of --alignment'),
        (('--alignment=x.png',), b'a\nb\n', '--alignment=x.png: draws one line'),
        (('--alignment=x.png', '--head=9'), b'a\n', '--head=9: there are 2, from 0 to 1'),
        (('--alignment=x.pdf',), b'a\n', '--alignment=x.pdf: the name of a PNG file ends in .png'),
        (('--alignment=no/x.png',), b'a\n', 'no/x.png: there is no directory no; give a file'),
        (('--input=none',), b'', '--input=none: no such file'),
        (('--text=\udcff',), b'', '--text is not UTF-8'),
        (('--input=none', '--text=a'), b'', '--text and --input: give one of them'),
    ],
)
def test_translate_answers_bad_input_with_one_line(workdir, arguments, text, line):
    done = piped(workdir, text, *arguments)
    assert done.returncode == 2
    assert line in done.stderr.decode()
    assert done.stderr.decode().count('\n') == 1


def test_symbols_that_the_tokenizer_does_not_know_are_named(workdir):
    done = piped(workdir, 'abc\naXbß\n'.encode())
    assert done.returncode == 0
    assert done.stdout.count(b'\n') == 2
    assert done.stderr.decode() == "line 2: unknown to the tokenizer of this run: 'X' 'ß'\n"


def test_a_closed_input_or_output_is_no_traceback(workdir):
    command = f'{sys.executable} -m minigpt_jax.translate --workdir={workdir}'
    for line, said in (
        (f'{command} <&-', 'error: standard input is closed: give --text or --input\n'),
        (f'yes abc | head -200 | {command} | head -0', ''),
    ):
        done = subprocess.run(
            line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.stderr == said


def test_a_workdir_of_the_wrong_family_is_refused(workdir, text_file, tmp_path):
    done = run('sample', f'--workdir={workdir}', '--prompt=a', check=False)
    assert done.returncode == 2
    assert 'holds a model of the family encoder_decoder, and this command takes decoder' in (
        done.stderr
    )
    run('train', '--config=configs/minigpt.py', *TINY, f'--config.data.path={text_file}',
        f'--workdir={tmp_path}')  # fmt: skip
    done = run('translate', f'--workdir={tmp_path}', '--text=a', check=False)
    assert done.returncode == 2
    assert 'the family decoder, and this command takes encoder_decoder' in done.stderr
    assert done.stderr.count('\n') == 1
    done = run('evaluate', f'--workdir={tmp_path}', '--beam=2', check=False)
    assert done.returncode == 2
    assert 'the family decoder, which translates nothing' in done.stderr
    # evaluate takes both.
    figures = json.loads(run('evaluate', f'--workdir={tmp_path}', '--json').stdout)
    summary = json.loads((tmp_path / 'summary.json').read_text())
    np.testing.assert_allclose(figures['loss'], summary['val_loss'], rtol=1e-4)
    np.testing.assert_allclose(figures['bits_per_byte'], summary['bits_per_byte'], rtol=1e-4)


def test_evaluate_on_validation_and_on_files(workdir, tmp_path, monkeypatch):
    # Where the corpus has to be prepared again, that is not said in the midst of the figures.
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'empty'))
    done = run('evaluate', f'--workdir={workdir}', '--json')
    assert 'preparing copy' in done.stderr
    figures = json.loads(done.stdout)
    summary = json.loads((workdir / 'summary.json').read_text())
    np.testing.assert_allclose(figures['loss'], summary['val_loss'], rtol=1e-4)
    np.testing.assert_allclose(figures['perplexity'], np.exp(figures['loss']))
    source, reference = tmp_path / 'source', tmp_path / 'reference'
    source.write_text('abc\nabcdefghabcd\nhgfe\n')
    translation = run('translate', f'--workdir={workdir}', '--text=abc').stdout
    reference.write_text(f'{translation}abcdefghabcd\nhgfe\n')
    arguments = [f'--workdir={workdir}', f'--source={source}', f'--reference={reference}']
    figures = json.loads(run('evaluate', *arguments, '--json').stdout)
    assert (figures['pairs'], figures['too_long']) == (3, 1)
    assert 1 / 3 <= figures['exact_match'] < 1
    assert 'exact_match' in run('evaluate', *arguments).stdout
    reference.write_text('abc\n')
    done = run('evaluate', *arguments, check=False)
    assert done.returncode == 2
    assert f'{source} has 3 lines and {reference} has 1' in done.stderr


def test_a_run_carries_both_of_its_tokenizers(workdir):
    as_dict = json.loads((workdir / 'tokenizer.json').read_text())['tokenizer']
    tokenizer = tokenizers.tokenizer_from_dict(as_dict)
    assert tokenizer.vocab_size == (12, 12)
