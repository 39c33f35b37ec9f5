"""moba_train: distributed long-context pretraining around MoBA (Mixture of Block Attention).

Importing the package is cheap on purpose: torch is imported by the modules that need it, so that
`moba-train --help` and the data tools start at once.
"""

__version__ = "0.1.0"
