"""Tables of a finished `moba-train sparsify` as Markdown, and their numbers as a result file.

bash launch/smollm2.sh sparsify
python -m benchmarks.sparsify_tables runs/smollm2/sparse/summary.json --output sparsify-h200.json
"""

import argparse
import json
from pathlib import Path

from benchmarks.record import markdown, save
from moba_train.tools.sparsify.page import tables, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, help="summary.json in the command's OUTPUT")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    given = parser.parse_args()
    found = json.loads(given.summary.read_text())
    save(given.output, found.pop("request"), [found])
    print(verdict(found))
    for table in tables(found):
        print(f"\n**{table.title}.** {table.note}\n")
        print(markdown([table.head, *table.rows]))


if __name__ == "__main__":
    main()
