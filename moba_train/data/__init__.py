"""From corpora on disk to micro-batches. Only batch and loader need torch.

indexed     Megatron's .bin/.idx pair: reader and writer
shuffle     permutations that never change
stream      one corpus as an endless, shuffled stream of tokens
blend       which source each sample comes from
samples     the samples of a stage, as a pure function of their index
stretches   parts of long documents, for evaluation by position
batch       one micro-batch as tensors
tokenizer   sentencepiece models
loader      the micro-batches of a rank's step, read ahead
"""
