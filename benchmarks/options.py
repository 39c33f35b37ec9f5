"""Command-line options that several programs have in common."""

import argparse

import torch

from moba_train.config.base import parse_number


def length(text: str) -> int:
    """Parse an option that counts tokens: `8192`, `128K`, `1M`; K is 1024."""
    return parse_number(text, 1024)


def need_gpus(parser: argparse.ArgumentParser, count: int = 1) -> None:
    """End the program with status 2 and the reason unless this machine has `count` GPUs."""
    if (found := torch.cuda.device_count()) < count:
        parser.error(f"{count} GPU(s) needed, torch {torch.__version__} finds {found} on this machine")
