"""Metrics of answers in words, from 0 to 1: those of RULER, HELMET (Yen et al. 2024, arXiv:2410.02694) and LongBench
(Bai et al. 2023, arXiv:2308.14508).

`normalized` is SQuAD's (Rajpurkar et al. 2016, arXiv:1606.05250), which both use: small letters, no punctuation, no
articles. ROUGE-L has the words of Google's package rouge-score.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
"""Score of an answer against its references (one is enough, unless a metric says otherwise), among labels."""


def found_share(answer: str, references: Sequence[str]) -> float:
    """RULER's score (`string_match_all`): the share of the references that the answer contains, in any case."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the normalised answer equals a reference."""
    return float(normalized(answer) in map(normalized, references))


def substring_exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the normalised answer contains a reference."""
    return float(any(normalized(reference) in normalized(answer) for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the normalised answer's words, with the best reference."""
    return max(
        _f1((Counter(given) & Counter(wanted)).total(), len(given), len(wanted))
        for given, wanted in ((normalized(answer).split(), normalized(one).split()) for one in references)
    )


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words, with the best reference."""
    given = _words(answer)
    return max(_f1(_common_subsequence(given, wanted), len(given), len(wanted)) for wanted in map(_words, references))


def accuracy(answer: str, references: Sequence[str], labels: Sequence[str]) -> float:
    """1 if the first of the labels in the answer is a reference; of labels that begin together, the longest."""
    found = re.search(
        "|".join(rf"(?<!\w){re.escape(label)}(?!\w)" for label in sorted(labels, key=len, reverse=True)),
        answer,
        re.IGNORECASE,
    )
    return float(found is not None and found[0].lower() in {reference.lower() for reference in references})


def ndcg_10(answer: str, references: Sequence[str]) -> float:
    """Normalised discounted cumulative gain of the first ten different numbers in the answer, identifiers of passages.
    The references are those of the relevant passages, best first: the last has grade 1, each one before it 1 more."""
    grades = {reference: len(references) - rank for rank, reference in enumerate(references)}
    ranked = [*dict.fromkeys(re.findall(r"\d+", answer))][:10]
    gain = sum(grades.get(passage, 0) / math.log2(rank + 2) for rank, passage in enumerate(ranked))
    best = sum(grade / math.log2(rank + 2) for rank, grade in enumerate([*grades.values()][:10]))
    return gain / best


METRICS: dict[str, Metric] = {
    "exact_match": lambda answer, references, _: exact_match(answer, references),
    "substring_exact_match": lambda answer, references, _: substring_exact_match(answer, references),
    "all_found": lambda answer, references, _: found_share(answer, references),
    "f1": lambda answer, references, _: f1(answer, references),
    "rouge_l": lambda answer, references, _: rouge_l(answer, references),
    "accuracy": accuracy,
    "ndcg_10": lambda answer, references, _: ndcg_10(answer, references),
}
"""Metrics by the name that a file of tasks gives them."""


def normalized(text: str) -> str:
    """Small letters, without punctuation, articles and repeated spaces."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _f1(common: int, given: int, wanted: int) -> float:
    return 2 * common / (given + wanted) if common else 0.0


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(second) + 1)
    for word in first:
        before = 0  # length without this word of `first` and without the present one of `second`
        for at, other in enumerate(second, start=1):
            before, lengths[at] = lengths[at], before + 1 if word == other else max(lengths[at], lengths[at - 1])
    return lengths[-1]


def beginning(answer: str, stop: str | None) -> str:
    """The answer without spaces at its ends, up to the text `stop`, behind which models ask themselves more."""
    text = answer.strip()
    return text if stop is None else text.split(stop)[0].strip()
