"""`moba-data`: from raw text and conversations to training corpora.

cli              the commands
train_tokenizer  training a sentencepiece tokenizer
documents        documents from files
encoders         text to token ids, with three types of tokenizers
segments         faster encoding with sentencepiece models
tokenize_corpus  from text to a corpus
parts            one part of a corpus, made once by any process
conversations    conversations from JSON records
sft              from conversations to a corpus with a loss mask
long_range       long documents whose end depends on their beginning, for miniature recipes
stats            document lengths, and the sparsity of MoBA on them
blend            preview of a recipe's blend
verify           checking every byte of a corpus
progress         progress bars and log lines
"""
