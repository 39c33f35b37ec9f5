"""Rotary embedding: attention sees distances, and context extension changes frequencies as published."""

import cmath
import math

import pytest
import torch

from moba_train.config.model import RopeConfig
from moba_train.model.rope import apply_rope, rope_cos_sin, rope_frequencies

HEAD_DIM = 16


def rotate(x: torch.Tensor, positions: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    return apply_rope(x, *rope_cos_sin(positions.to(x.device), config, HEAD_DIM))


def random_heads(tokens: int, device: torch.device | str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(tokens, 2, HEAD_DIM, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("position", [0, 1, 4095, 1_000_000])
@pytest.mark.parametrize("config", [RopeConfig(), RopeConfig(kind="abf", theta=5e6), RopeConfig(kind="pi", factor=8)])
def test_each_pair_turns_by_position_times_its_frequency(
    position: int, config: RopeConfig, device: torch.device
) -> None:
    """Written with complex numbers; dimension i pairs with i + d/2. At 10**6 a float32 angle would be off by 0.06."""
    x = random_heads(1, device)
    before, turned = x[0, 0].tolist(), rotate(x, torch.tensor([position]), config)[0, 0].tolist()
    half = HEAD_DIM // 2
    for i in range(half):
        angle = position / config.factor * config.theta ** (-2 * i / HEAD_DIM)
        want = complex(before[i], before[i + half]) * cmath.exp(1j * angle)
        assert complex(turned[i], turned[i + half]) == pytest.approx(want, abs=1e-6)


def test_scores_depend_on_distance_alone(device: torch.device) -> None:
    q, k = random_heads(1, device), random_heads(2, device)[1:]

    def score(q_at: int, k_at: int) -> torch.Tensor:
        config = RopeConfig(theta=5e5)
        return (rotate(q, torch.tensor([q_at]), config) * rotate(k, torch.tensor([k_at]), config)).sum(-1)

    for shift in (1, 1000, 10**6):
        torch.testing.assert_close(score(12 + shift, 5 + shift), score(12, 5), rtol=0, atol=1e-5)
    assert (score(12, 5) - score(12, 6)).abs().min() > 1e-3


def test_abf_slows_every_frequency_but_the_first(device: torch.device) -> None:
    plain = rope_frequencies(RopeConfig(), HEAD_DIM, device)
    abf = rope_frequencies(RopeConfig(kind="abf", theta=5e6), HEAD_DIM, device)
    assert plain[0] == abf[0] == 1
    assert (abf[1:] < plain[1:]).all()


def test_pi_squeezes_the_new_length_into_the_trained_one(device: torch.device) -> None:
    x = random_heads(4, device)
    squeezed = rotate(x, torch.tensor([0, 4, 40, 400]), RopeConfig(kind="pi", factor=4))
    torch.testing.assert_close(squeezed, rotate(x, torch.tensor([0, 1, 10, 100]), RopeConfig()), rtol=0, atol=1e-6)


def test_factor_belongs_to_pi_alone(device: torch.device) -> None:
    """A `factor` left over in a recipe must not change what `none` and `abf` do."""
    for kind in ("none", "abf"):
        left_over, clean = (RopeConfig(kind=kind, factor=f) for f in (4, 1))
        assert torch.equal(rope_frequencies(left_over, HEAD_DIM, device), rope_frequencies(clean, HEAD_DIM, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rotation_is_rounded_once_to_the_inputs_dtype(dtype: torch.dtype, device: torch.device) -> None:
    x = random_heads(3, device, torch.float32).to(dtype)
    positions = torch.tensor([0, 7, 90_001])
    turned = rotate(x, positions, RopeConfig())
    assert turned.dtype == dtype
    assert torch.equal(turned, rotate(x.float(), positions, RopeConfig()).to(dtype))


def yarn_by_hand(i: int, theta: float, factor: float, trained: int, head_dim: int) -> float:
    """The frequency of pair i, in plain float64 and in the words of the paper's section 3.2: the pairs that turn 32
    times and once in the trained length are where the ramp begins and ends, rounded outwards to integer indices."""
    plain = theta ** (-2 * i / head_dim)

    def pair_that_turns(times: float) -> float:
        # trained * theta ** (-2 i / d) / (2 pi) = times, solved for i
        return math.log(trained / (2 * math.pi * times), theta) * head_dim / 2

    begin, end = max(0, math.floor(pair_that_turns(32))), min(head_dim - 1, math.ceil(pair_that_turns(1)))
    slow = min(1.0, max(0.0, (i - begin) / (end - begin)))
    return plain / factor * slow + plain * (1 - slow)


@pytest.mark.parametrize("position", [0, 1, 70_000, 1_000_000])
@pytest.mark.parametrize(
    ("theta", "factor", "trained", "head_dim"),
    [(1e4, 8, 4096, 64), (5e5, 32, 8192, 128), (1e4, 8, 128, 64), (10, 4, 840, 8)],
)
def test_yarn_turns_and_scales_as_published(
    position: int, theta: float, factor: int, trained: int, head_dim: int, device: torch.device
) -> None:
    """Every pair of a query and key, against float64 complex numbers; both are scaled by 0.1 ln(factor) + 1."""
    config = RopeConfig(kind="yarn", theta=theta, factor=factor, original_seq_len=trained)
    x = torch.randn(1, 1, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_cos_sin(torch.tensor([position], device=device), config, head_dim)
    assert cos.dtype == sin.dtype == torch.float32
    turned, half = apply_rope(x.to(device), cos, sin)[0, 0].tolist(), head_dim // 2
    before = x[0, 0].tolist()
    for i in range(half):
        angle = position * yarn_by_hand(i, theta, factor, trained, head_dim)
        scale = 0.1 * math.log(factor) + 1
        want = scale * complex(before[i], before[i + half]) * cmath.exp(1j * angle)
        assert complex(turned[i], turned[i + half]) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("factor", [8, 64])
def test_llama3_scales_as_meta_publishes(factor: int, device: torch.device) -> None:
    """By wavelengths, as in Meta's code: short ones stay, long ones are stretched, those between are blended."""
    config = RopeConfig(kind="llama3", theta=5e5, factor=factor, original_seq_len=8192)
    got = rope_frequencies(config, 128, device).tolist()
    kinds = set()
    for i, frequency in enumerate(got):
        plain = 5e5 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            kind, want = "short", plain
        elif wavelength > 8192 / 1:
            kind, want = "long", plain / factor
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            kind, want = "between", (1 - smooth) * plain / factor + smooth * plain
        kinds.add(kind)
        assert frequency == pytest.approx(want, rel=1e-12)
    assert kinds == {"short", "long", "between"}
    assert rope_cos_sin(torch.tensor([0], device=device), config, 128)[0].max() == 1


def test_yarn_leaves_fast_frequencies_and_interpolates_slow_ones(device: torch.device) -> None:
    plain = rope_frequencies(RopeConfig(theta=5e5), 128, device)
    yarn = rope_frequencies(RopeConfig(kind="yarn", theta=5e5, factor=16, original_seq_len=8192), 128, device)
    turns = 8192 * plain / (2 * math.pi)
    torch.testing.assert_close(yarn[turns > 40], plain[turns > 40], rtol=0, atol=0)
    torch.testing.assert_close(yarn[turns < 0.8], plain[turns < 0.8] / 16)
    unstretched = RopeConfig(kind="yarn", theta=5e5, factor=1, original_seq_len=8192)
    torch.testing.assert_close(rope_frequencies(unstretched, 128, device), plain)
