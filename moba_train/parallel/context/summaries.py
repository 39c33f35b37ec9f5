"""Summaries of all keys of a sequence, computed from the ranks' shards of keys.

The owner of a unit (units.py) receives its other keys and summarizes the complete unit. Adding up the summaries of its
parts would differ in the last bits, so near-ties would be selected differently than on one device.

Shape suffixes: L rows of a shard, U tokens in a rank's own units, K key/value heads, D head width.
"""

from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.units import OwnedUnits, owned_units, rows_of_own_units


def all_summaries(
    k_LKD: Tensor, call: AttentionCall, sequence: SequenceLayout, communicator: Communicator
) -> Tensor | None:
    """The result of `summarize` for all keys of the sequence, bit for bit, from each rank's shard of keys."""
    units = owned_units(call.layout, sequence, call.attention.alignment)
    keys_UKD = rows_of_own_units(k_LKD, units, sequence, communicator)
    return summaries_of_own_units(keys_UKD, units, call, communicator)


def summaries_of_own_units(
    keys_UKD: Tensor, units: OwnedUnits, call: AttentionCall, communicator: Communicator
) -> Tensor | None:
    """The result of `summarize` for all keys of the sequence, from the keys of each rank's own units."""
    summaries = call.part(None, units.ranges[communicator.rank]).summarize(keys_UKD)
    if summaries is not None:
        communicator.all_reduce(summaries)  # exact: each row is zero on all ranks but one
    return summaries
