"""Pipeline parallelism: each rank of a pipeline has a part of the layers.

split     which layers the ranks have
model     a rank's part of the model: evaluation passes hidden states from rank to rank
schedule  training: micro-batches in the order of one of torch's schedules
"""
