"""From corpora on disk to micro-batches. Only stage_data, batch and loader need torch.

indexed         reader and writer of Megatron's .bin/.idx pair
token_file      the tokens of a corpus, read without a memory map, and sampled
sidecar         how a corpus was made, and what was written
fingerprint     what identifies the content of a corpus
shuffle         permutations that do not depend on the numpy version
stream          a corpus, or a length bucket of it, as an endless, shuffled stream of tokens
best_fit        best-fit-decreasing bin packing
packers         packing a stream into samples: concatenated and chopped, or by best fit
length_buckets  the ranges of document lengths that a blend reads, and their weights
blend           the source of each sample
loss_mask       which tokens carry loss, and with what weight
samples         the samples of a stage, as a pure function of their index
stage_data      from a recipe's stage to its samples
long_documents  samples that lie inside one long document, for evaluation by position
batch           one micro-batch as tensors
tokenizer       sentencepiece models and tokenizer.json files
control_tokens  special tokens that are spelt out in text
corpus_marks    how documents begin and end
chat_template   conversations as text, and which part of it carries loss
confined_template  a chat template from elsewhere, in a process of its own with limits
load_template   chat templates by name, or from a file or a model's folder
loader          the micro-batches of a rank's optimizer step, prepared ahead of time
"""
