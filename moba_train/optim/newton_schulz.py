"""Newton-Schulz iteration: the orthogonal factor of a matrix by matrix products alone."""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the polynomial a s + b s^3 + c s^5 (Jordan et al. 2024, Muon). It takes singular values from (0, 1]
near 1 in few steps, but does not converge: five steps leave those above 0.006 between 0.68 and 1.14."""
_EPS = 1e-7
"""Least norm that a matrix is divided by: a matrix of zeros stays one."""


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """U f(S) V^T for `matrix` = U S V^T, [rows, columns], with f near 1; computed in the dtype of `matrix`.

    f is `steps` times the polynomial of `COEFFICIENTS`, after S was divided by its norm. The products take
    steps * (4 short^2 long + 2 short^3) FLOPs, where short and long are the two sizes.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / norm.clamp(min=_EPS)).to(matrix.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
