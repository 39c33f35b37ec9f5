"""torchrun's agent with its ranks forked from it, for the chaos suite: a restart does not import torch again.

python -m benchmarks.chaos_launch RANKS RECIPE.yaml      equivalent to torchrun --standalone --max-restarts 1000
"""

import argparse
import sys
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks import chaos_rank


def train(recipe: str) -> None:
    """Train as one rank; exits with its code unless it is 0."""
    if code := chaos_rank.train([recipe]):
        sys.exit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("recipe")
    arguments = parser.parse_args()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=arguments.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=1000,
        monitor_interval=0.1,
    )
    elastic_launch(config, train)(arguments.recipe)
