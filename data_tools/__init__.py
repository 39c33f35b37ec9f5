"""`moba-data`: from raw text and conversations to corpora that training reads.

cli              the commands
train_tokenizer  a sentencepiece tokenizer
documents        documents from files
encoders         text to ids with any of three kinds of tokenizers
segments         sentencepiece's ids, faster
tokenize_corpus  from text to a corpus
parts            one part of it, in any process, once
conversations    conversations from JSON records
sft              conversations to a corpus with a loss mask
long_range       long documents whose end depends on their beginning, for miniatures
stats            lengths of documents, and what they leave of MoBA's sparsity
blend            what a recipe's blend comes to
verify           checking every byte of a corpus
progress         bars and lines of progress
"""
