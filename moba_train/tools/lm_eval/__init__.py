"""`moba-train lm-eval`: tasks of the package lm-eval on our own model. Only here is nothing imported of it."""

import importlib

from moba_train.errors import UserError

INSTALL = "pip install 'lm-eval[ruler]>=0.4.13' 'transformers>=5' tokenizers"


def check_installed() -> None:
    """Raise UserError, with the command that installs it, when a package that the command needs is missing."""
    for module in ("lm_eval.evaluator", "transformers"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"moba-train lm-eval needs the package lm-eval ({error}); run `{INSTALL}`") from error
