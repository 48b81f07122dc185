"""Command: translate text with a trained encoder-decoder, a line in, a line out.

    echo 'Monday, November 30, 2026' |
        python -m minigpt_jax.translate --workdir=runs/translate_dates

With --nbest=N every line has N, the last of them empty where fewer were found or there was nothing
to translate. Exit status 1 where a line was too long for the model; all others are answered. With
--alignment=FILE.png a figure shows which source tokens each token of the best translation attended
to, as the mean over layers and heads, or with --layer and --head of one.
"""

import pathlib
import sys

from absl import flags

from minigpt_jax import cli
from minigpt_jax.analysis.capture import translation_attention
from minigpt_jax.data.corpora import decode_utf8, split_lines
from minigpt_jax.inference.decoding import translate
from minigpt_jax.report import figures
from minigpt_jax.report.tables import write_atomically
from minigpt_jax.training.config import is_utf8

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a trained run.', required=True)
_TEXT = flags.DEFINE_string('text', None, 'Text to translate; without it and --input, stdin.')
_INPUT = flags.DEFINE_string('input', None, 'File to translate, UTF-8.')
_BEAM, _AVERAGE, _LENGTH_PENALTY = cli.define_search_flags()
_NBEST = flags.DEFINE_integer(
    'nbest', 1, 'Translations a line, best first; at most --beam.', lower_bound=1
)
_SCORES = flags.DEFINE_bool(
    'scores', False, 'Put the score, log p / lp, before each translation; see --length_penalty.'
)
_ALIGNMENT = flags.DEFINE_string('alignment', None, 'Draw the attention of one line, a PNG.')
_LAYER = flags.DEFINE_integer('layer', None, 'Of the alignment, from 0; default: the mean.')
_HEAD = flags.DEFINE_integer('head', None, 'Of the alignment, from 0; default: the mean.')


def main():
    if _NBEST.value > _BEAM.value:
        cli.fail(f'--nbest={_NBEST.value}: at most --beam={_BEAM.value}; give --beam, too')
    if _TEXT.value is not None and _INPUT.value is not None:
        cli.fail('--text and --input: give one of them')
    if _ALIGNMENT.value is not None:
        _check_picture(pathlib.Path(_ALIGNMENT.value))
    for flag in (_LAYER, _HEAD):
        if flag.value is not None and _ALIGNMENT.value is None:
            cli.fail(f'--{flag.name}={flag.value}: is about the figure of --alignment=FILE.png')
    cli.use_compilation_cache()
    workdir = cli.directory('workdir', _WORKDIR.value)
    run = cli.load_run_of('encoder_decoder', workdir, _AVERAGE.value)
    lines = _lines()
    if _ALIGNMENT.value is not None:
        _check_alignment(run.config.model, lines)
    found = translate(
        run.model,
        run.params,
        run.tokenizer,
        run.config.model.context_length,
        lines,
        beam_size=_BEAM.value,
        length_penalty=_LENGTH_PENALTY.value,
    )
    status = 0
    for number, (line, best) in enumerate(zip(lines, found, strict=True), start=1):
        if unknown := run.tokenizer.source.unknown_symbols(line):
            print(
                f'line {number}: unknown to the tokenizer of this run: '
                f'{" ".join(map(repr, unknown))}',
                file=sys.stderr,
            )
        if best is None:
            status = 1
            print(
                f'line {number}: longer than the {run.config.model.context_length} tokens that the '
                'model takes; not translated',
                file=sys.stderr,
            )
        # As many lines for each, so that a reader of the output knows which are whose.
        shown = [*(best or []), *_NBEST.value * [None]][: _NBEST.value]
        for translation in shown:
            print(_line(translation) if translation else '')
    if _ALIGNMENT.value is not None and found[0] is not None:
        _draw_alignment(run, found[0][0])
    return status


def _line(translation):
    text = ' '.join(translation.text.splitlines())  # a model may write the end of a line
    return f'{translation.score:.4f}\t{text}' if _SCORES.value else text


def _check_picture(path):
    if path.suffix.lower() != '.png':
        cli.fail(f'--alignment={path}: the name of a PNG file ends in .png')
    if path.is_dir() or not path.parent.is_dir():
        what = 'a directory' if path.is_dir() else f'there is no directory {path.parent}'
        cli.fail(f'--alignment={path}: {what}; give a file to write')


def _check_alignment(model, lines):
    if len(lines) != 1 or not lines[0]:
        cli.fail(f'--alignment={_ALIGNMENT.value}: draws one line, that is not empty; give one')
    for flag, count in ((_LAYER, model.num_layers), (_HEAD, model.num_heads)):
        if flag.value is not None and not 0 <= flag.value < count:
            cli.fail(f'--{flag.name}={flag.value}: there are {count}, from 0 to {count - 1}')


def _draw_alignment(run, best):
    weights_TS, keys, queries = translation_attention(
        run.model,
        run.params,
        run.tokenizer,
        best.source_ids,
        best.ids,
        layer=_LAYER.value,
        head=_HEAD.value,
    )
    of = [
        f'mean over {flag.name}s' if flag.value is None else f'{flag.name} {flag.value}'
        for flag in (_LAYER, _HEAD)
    ]
    title = f'Encoder-decoder attention: {", ".join(of)}'
    picture = figures.png(figures.attention_figure(weights_TS, keys, queries, title))
    write_atomically(pathlib.Path(_ALIGNMENT.value), picture)


def _lines():
    """The lines to translate: of a flag, a file or the pipe."""
    if _TEXT.value is not None:
        if not is_utf8(_TEXT.value):
            cli.fail('--text is not UTF-8')
        text = _TEXT.value or '\n'  # an empty line is one, too
    elif _INPUT.value is not None:
        path = pathlib.Path(_INPUT.value)
        if not path.is_file():
            cli.fail(f'--input={_INPUT.value}: no such file')
        text = decode_utf8(path, path.read_bytes())
    elif sys.stdin is None:
        cli.fail('standard input is closed: give --text or --input')
    else:
        text = decode_utf8('standard input', sys.stdin.buffer.read())
    return split_lines(text)


if __name__ == '__main__':
    cli.run_command(main)
