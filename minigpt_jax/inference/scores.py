"""How good translations are: exact match, BLEU and chrF, as the literature computes them."""

import functools

import sacrebleu
import sacremoses


def score_translations(hypotheses, references, language):
    """{name: figure} of translations against one reference each; BLEU and chrF from 0 to 100.

    - exact_match: share of hypotheses that are their reference, from 0 to 1.
    - bleu, chrf: of sacreBLEU, each with its signature. Papineni et al. 2002; Popović 2015.
    - bleu_lower_tokenized: BLEU of lower-cased Moses tokens, the figure of papers on Multi30k. It
      is not comparable to `bleu`. Elliott et al. 2016.

    `language` is that of the references, for the tokenizer of Moses.

    Source: Post 2018 (sacreBLEU).
    """
    exact = [h == r for h, r in zip(hypotheses, references, strict=True)]
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    tokenized = sacrebleu.BLEU(tokenize='none', force=True)
    tokens = _lower_tokens(language)
    return {
        'exact_match': sum(exact) / len(exact),
        'bleu': bleu.corpus_score(hypotheses, [references]).score,
        'bleu_signature': str(bleu.get_signature()),
        'chrf': chrf.corpus_score(hypotheses, [references]).score,
        'chrf_signature': str(chrf.get_signature()),
        'bleu_lower_tokenized': tokenized.corpus_score(
            [*map(tokens, hypotheses)], [[*map(tokens, references)]]
        ).score,
    }


def _lower_tokens(language):
    tokenize = sacremoses.MosesTokenizer(lang=language).tokenize
    as_text = functools.partial(tokenize, return_str=True, escape=False)
    return lambda text: as_text(text.lower())
