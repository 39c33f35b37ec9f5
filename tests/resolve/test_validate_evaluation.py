"""Evaluations and exit criteria that cannot work are refused, with the key to change."""

import pytest

from tests.resolve.refusals import assert_refused
from tests.small_recipe import Load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["evaluation.position_wise={bucket: 3K}", "data.validation=[{path: v}]"],
            "evaluation.position_wise.bucket: given 3072, which does not divide stages[0].seq_len 2048",
        ),
        (["evaluation.position_wise={}"], "evaluation.position_wise: needs documents to evaluate on; set data.vali"),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}"],
            "stages[1].until: trailing_loss is not evaluated; set evaluation.position_wise",
        ),
        (
            ["stages.1.until={metric: eval_loss, at_most: 2, max_tokens: 9M}"],
            "stages[1].until: eval_loss is not evaluated; set data.validation",
        ),
        (
            ["stages.1.until={metric: trailing_los, at_most: 2, max_tokens: 9M}"],
            "stages[1].until.metric: given 'trailing_los', which no evaluation gives (did you mean 'trailing_loss'?)",
        ),
        (
            [
                "stages.0.until={metric: trailing_gap, at_most: 2, max_tokens: 9M}",
                "evaluation.position_wise={}",
            ],
            "stages[0].until.metric: given 'trailing_gap', but all layers of stage 'short' have full attention, ",
        ),
        (
            ["stages.1.until={max_tokens: 9M}"],
            "stages[1].until: no criterion given; allowed: trailing_loss_recovered, or metric with at_most or at_least",
        ),
        (
            ["stages.1.until={metric: eval_loss, max_tokens: 9M}"],
            "stages[1].until: given metric with no bound; allowed: metric with either at_most or at_least",
        ),
        (
            ["stages.1.until={metric: eval_loss, at_most: 2, at_least: 1, max_tokens: 9M}"],
            "stages[1].until: given metric with at_most and at_least; allowed: metric with either",
        ),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, metric: eval_loss, max_tokens: 9M}"],
            "stages[1].until: given trailing_loss_recovered and metric; allowed: one criterion",
        ),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 2M}"],
            "stages[1].until.max_tokens: given 2000000; allowed: more than the stage's tokens 2000000",
        ),
        (
            ["stages.0.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}"],
            "stages[0].until.trailing_loss_recovered.reference: given 'full', but all layers of stage 'short' have ",
        ),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0, reference: before}, max_tokens: 9M}"],
            "stages[1].until.trailing_loss_recovered.reference: given 'before', but no stage before 'long' is evalu",
        ),
        (
            [
                "stages.1.seq_len=2048",
                "stages.0.until={trailing_loss_recovered: {tolerance: 0, reference: before}, max_tokens: 9M}",
            ],
            "stages[0].until.trailing_loss_recovered.reference: given 'before', but no stage before 'short' is evalu",
        ),
        (
            [
                "stages.0={name: short, seq_len: 8K, tokens: 1M, evaluate: false}",
                "stages.1.until={trailing_loss_recovered: {tolerance: 0, reference: before}, max_tokens: 9M}",
            ],
            "stages[1].until.trailing_loss_recovered.reference: given 'before', but no stage before 'long' is evalu",
        ),
        (
            ["stages.1.until={metric: eval_loss, at_most: 2, max_tokens: 9M}", "stages.1.evaluate=false"],
            "stages[1].until: needs the stage's evaluations; given evaluate: false, allowed: true",
        ),
        (
            [
                "stages.0.evaluate=false",
                "data.validation=[{path: v}]",
                "evaluation.every=10",
                "checkpoint={every: 10, keep_best: 2}",
            ],
            "checkpoint.keep_best: given 2, but not every checkpoint is evaluated: stages[0].evaluate is false",
        ),
        (
            [
                "stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}",
                "optim.schedule.min_lr_ratio=0",
            ],
            "stages[1].until: beyond its tokens the stage would go on with the learning rate at their end, which is 0",
        ),
    ],
)
def test_what_cannot_be_evaluated_or_waited_for_is_refused(load: Load, overrides: list[str], problem: str) -> None:
    assert_refused(load(*overrides), problem)
