"""A corpus of real long documents, built by `moba-data corpus`: its statistics, and what the build takes.

    python -m benchmarks.real_corpus --folder data/long --output benchmarks/results/real-corpus-cpu.json

Reads the packages that are installed, or those that were unpacked below `--root`. Times are those of this program and
of its processes; after an interruption, of the rest of the build. Run again on a finished corpus, it keeps the times of
`--output` and measures the rest. `repeats` is what `moba-data stats --repeats 8` shows, by upper bound of the distance.
"""

import argparse
import json
import resource
import time
from pathlib import Path

from benchmarks.record import save
from data_tools.build_corpus import CorpusOptions, build_corpus
from data_tools.corpus_manifest import MANIFEST
from data_tools.corpus_sources import find_sources
from data_tools.show import verify_corpus
from data_tools.stats import DISTANCES, MOST_TOKENS, repeat_shares

REPEATED = 8
"""Tokens of a repeated run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the corpus is built")
    parser.add_argument("--root", type=Path, default=Path("/"), help="folder that stands for /")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    sources, missing = find_sources(given.root, None, {})
    for name, install in missing.items():
        print(f"{name} is not installed: {install}")
    finished = (given.folder / MANIFEST).exists() and given.output.exists()
    earlier = json.loads(given.output.read_text())["results"] if finished else {}
    begin = time.monotonic()
    manifest = build_corpus(sources, given.folder, CorpusOptions(), given.workers)
    seconds = time.monotonic() - begin
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    results = {
        "seconds": round(seconds, 1),
        "processor_seconds": round(sum(each.ru_utime + each.ru_stime for each in used), 1),
        "peak_gib": round(max(each.ru_maxrss for each in used) / 2**20, 2),
    }
    results |= {key: earlier.get(key, value) for key, value in results.items()}
    repeats = {}
    for name in manifest["corpora"]:
        corpus, _ = verify_corpus(str(given.folder / name), None)
        shares = repeat_shares(corpus, REPEATED, MOST_TOKENS).round(5).tolist()
        repeats[name] = dict(zip([*map(str, DISTANCES), "farther"], shares, strict=True))
    save(given.output, {"workers": given.workers}, results | {"repeats": repeats, "manifest": manifest})
    train = manifest["corpora"]["train"]
    print(f"corpus {manifest['id']}: {train['documents']:,} documents, {train['tokens']:,} training tokens")


if __name__ == "__main__":
    main()
