"""From corpora on disk to micro-batches. Only stage_data, batch and loader need torch.

indexed        Megatron's .bin/.idx pair: reader and writer
shuffle        permutations that never change
stream         one corpus, or its documents of some lengths, as an endless, shuffled stream of tokens
packing        best-fit packing of any list of lengths
windows        cutting a stream into samples: concatenated and chopped, or packed
strata         the ranges of document lengths that a blend reads, and their weights
blend          which source each sample comes from
loss_mask      which tokens carry loss, and how much each counts
samples        the samples of a stage, as a pure function of their index
stage_data     the same, of a recipe's stage
stretches      parts of long documents, for evaluation by position
batch          one micro-batch as tensors
tokenizer      sentencepiece models and tokenizer.json files
chat_template  conversations as text, and which of it carries loss
loader         the micro-batches of a rank's step, read ahead
"""
