"""Command: how good a trained run is, on its validation split or on other texts.

    python -m minigpt_jax.evaluate --workdir=runs/translate_dates --beam=4
    python -m minigpt_jax.evaluate --workdir=runs/multi30k --source=FILE --reference=FILE --json

A decoder: loss, perplexity, bits per byte. A model of hidden tokens or of images: loss, perplexity
and accuracy. An encoder-decoder: loss and perplexity of target tokens, and of its translations
exact match, sacreBLEU and chrF with their signatures, and the lower-cased tokenised BLEU of the
literature. A source that is too long has an empty translation (`too_long` counts them), and a pair
of which a side is too long no loss (`without_loss`): training leaves such pairs out of all that it
judges. Pairs of which a side is empty are left out.
"""

import contextlib
import json
import math
import sys

import jax
from absl import flags
from tabulate import tabulate

from minigpt_jax import cli
from minigpt_jax.data import corpora, pairs
from minigpt_jax.inference.decoding import translate
from minigpt_jax.inference.scores import score_translations
from minigpt_jax.training import steps
from minigpt_jax.training.checkpoint import load_run
from minigpt_jax.training.sweep import check_corpus
from minigpt_jax.training.tasks import TASKS

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a trained run.', required=True)
_SOURCE = flags.DEFINE_string('source', None, 'Sources, a line each; default: validation.')
_REFERENCE = flags.DEFINE_string('reference', None, 'Their translations, a line each.')
_BEAM, _AVERAGE, _LENGTH_PENALTY = cli.define_search_flags()
_JSON = flags.DEFINE_bool('json', False, 'Print JSON, not a table.')


def main():
    if (_SOURCE.value is None) != (_REFERENCE.value is None):
        cli.fail('--source and --reference: give both or none of them')
    cli.use_compilation_cache()
    workdir = cli.directory('workdir', _WORKDIR.value)
    run = load_run(workdir, _AVERAGE.value)
    family = run.config.model.family
    for flag in (_SOURCE, _BEAM, _LENGTH_PENALTY):
        if family != 'encoder_decoder' and flag.present:
            cli.fail(
                f'--{flag.name}: {workdir} holds a model of the family {family}, which translates '
                'nothing'
            )
    with contextlib.redirect_stdout(sys.stderr):  # where notices go: stdout is for the figures
        figures = (_translation if family == 'encoder_decoder' else _validation)(run, workdir)
    figures = {'step': run.step} | figures
    if _JSON.value:
        print(json.dumps(figures, ensure_ascii=False))
    else:
        print(tabulate(figures.items(), floatfmt='.6g'))
    return 0


def _validation(run, workdir):
    task_class = TASKS[run.config.model.family]
    corpus = task_class.load(run.config.data)
    check_corpus(workdir, corpus)
    task = task_class(run.config, corpus)
    loss = _mean_loss(run, task_class, task.validation())
    columns = task.columns(loss['loss'])
    if 'val_perplexity' in columns:  # the family has none
        del loss['perplexity'], columns['val_perplexity']
    if 'bits_per_byte' in columns and columns['bits_per_byte'] is None:
        print('no bits per byte: the text has symbols that the tokenizer does not know')
    return loss | task.judge(run.model, run.params) | columns


def _translation(run, workdir):
    config, length = run.config, run.config.model.context_length
    if _SOURCE.value is None:
        corpus = corpora.load_corpus(config.data)
        check_corpus(workdir, corpus)
        texts = list(corpus.validation)
    else:
        texts = corpora.read_parallel(_SOURCE.value, _REFERENCE.value)
    encoded = pairs.encode_pairs(run.tokenizer, texts)
    buckets = pairs.make_buckets(
        encoded,
        context_length=length,
        num_buckets=config.data.num_buckets,
        batch_size=config.eval.batch_size,
        split='validation' if _SOURCE.value is None else '--source and --reference',
    )
    loss = _mean_loss(run, TASKS[config.model.family], pairs.validation_pairs(encoded, buckets))
    sources, references = zip(*texts, strict=True)
    found = translate(
        run.model,
        run.params,
        run.tokenizer,
        length,
        sources,
        beam_size=_BEAM.value,
        length_penalty=_LENGTH_PENALTY.value,
    )
    hypotheses = [best[0].text if best else '' for best in found]
    return (
        {
            'beam': _BEAM.value,
            'length_penalty': _LENGTH_PENALTY.value,
            'pairs': len(texts),
            'too_long': found.count(None),
            'without_loss': pairs.num_too_long(encoded, length),
        }
        | loss
        | score_translations(hypotheses, references, config.data.target_language)
    )


def _mean_loss(run, task_class, validation):
    """Loss in nats a token, without label smoothing, and its exponential."""
    evaluate = jax.jit(steps.make_evaluate(run.model, losses=task_class.losses))
    total = count = 0.0
    for batches in validation:
        losses, targets = evaluate(run.params, batches)
        total, count = total + float(losses), count + float(targets)
    loss = total / count
    return {'loss': loss, 'perplexity': math.exp(loss) if loss < 700 else None}


if __name__ == '__main__':
    cli.run_command(main)
