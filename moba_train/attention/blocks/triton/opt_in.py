"""What this backend does only when asked: GPU code that has not passed its GPU tests in the form that it has here.

`MOBA_TRAIN_OPT_IN=one_pass,replay` asks for both:
one_pass   gradients of long blocks in one pass (one_pass.py)
replay     launches repeated from a record (launch.py)
"""

import os
from typing import Literal

VARIABLE = "MOBA_TRAIN_OPT_IN"


def opted_in(name: Literal["one_pass", "replay"]) -> bool:
    """Whether the environment asks for it."""
    return name in os.environ.get(VARIABLE, "").split(",")
